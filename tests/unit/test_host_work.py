"""The script that measures host work still drives the real loop."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy" / "host_work.py"


def test_host_work_is_measured():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--requests", "3", "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["requests"], told["steps"]) == (3, 4)
    assert min(told["parts_ms"].values()) > 0
    assert 0 < told["of_which_drafter_ms"] < told["host_ms_per_step"]
