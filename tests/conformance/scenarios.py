"""Runs the scenarios of one black-box check: each is a function; all run, failures are told, the exit code counts."""

import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ.get("DFLASH2_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("DFLASH2_API_KEY", "none")
MODEL = "dflash2-embedded"
CHAT = [{"role": "user", "content": "Write a short story about a shy bird."}]
WEATHER = {  # a finite language, so that a tiny model finishes it
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "report_weather", "description": "Report the weather.", "parameters": WEATHER},
}


def run(scenarios: list[Callable[[], None]]) -> int:
    """Number of scenarios that failed, each told on one line and its traceback on the error stream."""
    failed = 0
    for scenario in scenarios:
        name = scenario.__name__
        try:
            scenario()
        except Exception as error:
            failed += 1
            traceback.print_exc()
            reason = next(iter(str(error).splitlines()), "") or traceback.extract_tb(error.__traceback__)[-1].line
            print(f"  FAILED {name}: {type(error).__name__}: {reason}"[:240], flush=True)
        else:
            print(f"  ok     {name}", flush=True)
    return failed


def same(got: object, expected: object, what: str = "") -> None:
    """Equality whose failure shows both sides."""
    assert got == expected, f"{what}: got {got!r}, expected {expected!r}"


def finish(scenarios: list[Callable[[], None]]) -> None:
    """Runs them and ends the process."""
    sys.exit(1 if run(scenarios) else 0)
