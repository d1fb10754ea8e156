"""The script that measures a drafter in a process of its own still drives two real processes."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy/separate_cost.py"


def test_both_placements_are_measured():
    sizes = ["--concurrency", "2", "--prompts", "2", "--tokens", "12", "--pipelines", "split"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "1", *sizes], capture_output=True, text=True, timeout=180, check=True
    )
    lines = re.findall(r"^(.+): ([\d.]+) ms per step, ([\d.]+) ms per token, ([\d.]+) of colocated$", done.stdout, re.M)
    assert [name for name, *_ in lines] == ["colocated", "separate, split"]
    assert all(float(number) > 0 for _, *numbers in lines for number in numbers)
    assert float(lines[0][3]) == 1
