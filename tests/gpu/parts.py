"""The parts of a run, each in a process of its own: a kernel that breaks the GPU's context must not take the others along.

A part gets what is left of the budget, at most its own share. What there is no time for is cut, and says so.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_LEAST_S = 5.0  # less is not worth the start of a process


@dataclass(frozen=True)
class Part:
    """script: takes the path of its result, and --dry-run. most_s: of the budget. interprets: a rehearsal runs the kernels themselves."""

    name: str
    script: str
    most_s: float
    interprets: bool = True


PARTS = (
    Part("equality", "equality.py", 150),
    Part("kernels", "kernel_times.py", 100),
    Part("lossless", "lossless.py", 80, interprets=False),  # a trained pair is too large for the interpreter
    Part("engine", "engine_times.py", 150),
)


def run_parts(
    parts: Sequence[Part], out: Path, *, budget_s: float, rehearsal: bool, clock: Callable[[], float] = time.monotonic
) -> dict[str, dict[str, Any]]:
    """Results by part; `status` is `passed`, `failed`, `error` or `cut`, with `reason` behind the last two."""
    started = clock()
    results = {}
    for part in parts:
        left_s = budget_s - (clock() - started)
        if left_s < _LEAST_S:
            results[part.name] = {"status": "cut", "reason": f"the budget of {budget_s:g} s was used up"}
            continue
        before = clock()
        results[part.name] = _run(part, out / f"part-{part.name}.json", min(left_s, part.most_s), rehearsal)
        results[part.name]["seconds"] = round(clock() - before, 1)
        print(f"{part.name}: {results[part.name]['status']} ({results[part.name]['seconds']} s)", flush=True)
    return results


def _run(part: Part, result: Path, limit_s: float, rehearsal: bool) -> dict[str, Any]:
    result.unlink(missing_ok=True)
    log = result.with_suffix(".log")
    command = [
        sys.executable,
        str(HERE / part.script),
        str(result),
        "--limit-s",
        str(limit_s),
        *(["--dry-run"] if rehearsal else []),
    ]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if rehearsal and part.interprets else {})
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parents[1], start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s + 10)  # a part ends itself at its limit, with what it has
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = json.loads(result.read_text()) if result.is_file() else {}
    if code == 0 and found:
        return found
    why = f"it did not end within {limit_s:.0f} s" if code is None else f"it ended with {code}"
    return {**found, "status": "error", "reason": f"{why}: {log.read_text()[-1500:]}"}
