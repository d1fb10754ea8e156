"""Starts `serve run dflash2_ray.app`, waits until it is ready, asks one question and shows what came back.

Called by deploy/quickstart: first argument 1 to stop the server after the answer, then key=value settings.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:8000"
QUESTION = "Write a short story about a shy bird."
PATIENCE_S = 600


def main() -> int:
    """Exit code 0 when an answer came."""
    once, settings = sys.argv[1] == "1", sys.argv[2:]
    if _status("/health") is not None:
        print(f"error: something already listens at {URL}; stop it first", file=sys.stderr)
        return 1
    log = Path("quickstart.log")
    command = [str(Path(sys.executable).with_name("serve")), "run", "dflash2_ray.app", *settings]
    print(f"starting: serve run dflash2_ray.app {' '.join(settings)} (log: {log})", flush=True)
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    stop = True
    try:
        if not _wait(server, log):
            return 1
        _ask()
        stop = once
        if not once:
            print(f"\nthe server runs on at {URL}; stop it with: kill -INT {server.pid}")
        return 0
    finally:
        if stop:
            _stop(server)


def _status(path: str) -> int | None:
    try:
        with urllib.request.urlopen(URL + path, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _wait(server: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether /ready came; shows new lines about the start-up meanwhile, and the end of the log if it did not."""
    started = time.monotonic()
    shown = 0
    while time.monotonic() - started < PATIENCE_S:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "start-up:" in line]
        for line in lines[shown:]:
            print("  " + line.partition("-- ")[2], flush=True)
        shown = len(lines)
        if _status("/ready") == 200:
            print(f"ready after {time.monotonic() - started:.0f} s")
            return True
        text = log.read_text(errors="replace")
        if server.poll() is not None or "cannot be served" in text:
            break
        time.sleep(0.5)
    why = [
        line for line in log.read_text(errors="replace").splitlines() if "cannot be served" in line or "Error" in line
    ]
    print("error: the service did not become ready", *(why[-1:] or ["see quickstart.log"]), sep="\n  ", file=sys.stderr)
    return False


def _ask() -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 128}
    request = urllib.request.Request(
        URL + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        data = json.load(answer)
    metrics, timing = data["metrics"]["speculative_decoding"], data["metrics"]["timing"]
    tokens = data["usage"]["completion_tokens"]
    length = metrics["mean_acceptance_length"]
    print(f"\n> {QUESTION}\n{data['choices'][0]['message']['content']}\n")
    print(f"model {data['model']}: {tokens} tokens, {tokens / timing['end_to_end_s']:.0f} tokens/s", end="")
    print(f", acceptance length {length:.2f} tokens per verify step" if length else ", plain decoding (no drafter)")
    print(f"try: curl {URL}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, then harder; only this process's own group."""
    for sign, patience in ((signal.SIGINT, 30), (signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        if server.poll() is not None:
            return
        os.killpg(server.pid, sign)
        try:
            server.wait(patience)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main())
