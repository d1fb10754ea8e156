"""The script that measures the prefix cache still drives both engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy" / "prefix_times.py"


def test_the_prefix_cache_is_measured():
    words = [sys.executable, SCRIPT, "--prefix", "64", "--repeats", "1", "--tokens", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["target"], told["prefix"]) == ("embedded", 64)
    for measure in ("ttft_ms", "tokens_per_s", "shared_tokens_per_s"):
        assert min(told[measure].values()) > 0
        assert told[measure].keys() == {"on", "off", "ratio"}
