"""The first command of the README, whole: it installs (here: nothing is missing), serves on port 8000, asks, shows the answer and leaves
nothing."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quickstart_answers_and_leaves_nothing():
    environment = os.environ | {"DFLASH2_VENV": sys.prefix}
    done = subprocess.run(
        [ROOT / "deploy" / "quickstart", "--once", "max_num_seqs=2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing" not in done.stdout
    told = re.search(
        r"model dflash2-embedded: (\d+) tokens, (\d+) tokens/s, acceptance length ([\d.]+) tokens per verify step",
        done.stdout,
    )
    assert told, done.stdout
    assert float(told[3]) > 1
    lines = (ROOT / "quickstart.log").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if "bookkeeper" in line and " CALL " in line], "it is called every second"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8000)) != 0
