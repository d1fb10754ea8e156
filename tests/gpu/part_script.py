"""What every part does the same: its arguments, its clock, and a result on disk after every step, so that nothing is lost to a time limit."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


class PartScript:
    """path: of the result. rehearsal: on a CPU. left_s: until this part should end."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("result", type=Path)
        parser.add_argument("--limit-s", type=float, required=True)
        parser.add_argument("--dry-run", action="store_true")
        arguments = parser.parse_args()
        self.rehearsal: bool = arguments.dry_run
        self.device = "cpu" if self.rehearsal else "cuda"
        self.path: Path = arguments.result
        self._end = time.monotonic() + arguments.limit_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def write(self, result: dict[str, Any]) -> None:
        """Replace what is on disk."""
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(result))
        os.replace(fresh, self.path)
