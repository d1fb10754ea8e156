"""The first command of the README, whole: it installs (here: nothing is missing), serves, asks, shows the answer and leaves nothing."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quickstart_answers_and_leaves_nothing():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"DFLASH2_VENV": sys.prefix, "RAY_SERVE_DEFAULT_HTTP_PORT": str(port)}
    done = subprocess.run(
        [ROOT / "deploy" / "quickstart", "--once", "max_num_seqs=2"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing" not in done.stdout
    told = re.search(r"model dflash2-embedded: (\d+) tokens, (\d+) tokens/s, acceptance length ([\d.]+) tokens per verify step", done.stdout)
    assert told, done.stdout
    assert float(told[3]) > 1
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in done.stdout
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
