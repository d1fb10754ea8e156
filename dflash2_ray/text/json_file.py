"""Reads one of a checkpoint's JSON files."""

import json
from pathlib import Path
from typing import Any

from dflash2_ray.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: not readable JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name}: expected a JSON object, got {type(data).__name__}")
    return data
