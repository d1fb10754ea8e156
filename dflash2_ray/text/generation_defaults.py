"""What a checkpoint itself says about stopping and sampling. It must not know requests."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash2_ray.text.json_file import read_json_object

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class GenerationDefaults:
    """eos_token_ids: what ends a text. sampling: values for fields that a request leaves out."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)


def read_generation_defaults(folder: Path, mode: str) -> GenerationDefaults:
    """mode `auto`: stop tokens and sampling from `generation_config.json`; `none`: only stop tokens, from `config.json`.

    Both files' stop tokens count: some checkpoints name the turn's end in only one of them. Raises CheckpointError.
    """
    folder = Path(folder)
    found = _ids(read_json_object(folder / "config.json"))
    sampling: dict[str, Any] = {}
    if mode == "auto":
        generation = read_json_object(folder / "generation_config.json")
        found = _ids(generation) + found
        if generation.get("do_sample") is not False:
            sampling = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    return GenerationDefaults(tuple(dict.fromkeys(found)), sampling)


def _ids(config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return [int(one) for one in value] if isinstance(value, list) else [int(value)]
