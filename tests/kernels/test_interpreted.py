"""Runs every file of `equality/` in a process of its own with Triton's interpreter: kernels on CPU tensors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which this environment lacks")

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "equality").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "equality" / name)],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout
