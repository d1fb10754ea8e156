"""Requests made from our own OpenAPI schema: no 5xx, only documented statuses and bodies, one shape of errors."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_openapi_schema(idle):
    """About a minute; tests/conformance/run makes more of them."""
    environment = {
        **os.environ,
        "SCHEMATHESIS_EXAMPLES": "25",
        "SCHEMATHESIS_SECONDS": "60",
        "PYTHON": sys.executable,
    }
    command = [str(REPOSITORY / "tests" / "conformance" / "schemathesis_check"), idle.url]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
