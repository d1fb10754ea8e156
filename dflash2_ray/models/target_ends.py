"""What a drafter in a process of its own borrows from the target's checkpoint: embedding and head, without any layer.

Must not know requests, drafts or ray.
"""

from pathlib import Path

import torch

from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.linear import PackedLinear
from dflash2_ray.models.source import load_target_config, read_target_facts
from dflash2_ray.models.target import _ends_tensor
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.models.tensor_files import TensorFiles

_EMBEDDING = "embed_tokens.weight"


def read_target_share(folder: Path, *, dtype: str, device: str) -> TargetShare:
    """The same share, to the bit, as that of the loaded target. dtype: `float32` or `bfloat16`. Raises CheckpointError."""
    config, facts, files = load_target_config(folder), read_target_facts(folder), TensorFiles(folder)
    names = [name for name in files.shapes if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
    if len(names) != 1:
        raise CheckpointError(f"target {folder}: expected one tensor named …{_EMBEDDING}, got {len(names)}")
    kind = getattr(torch, dtype)
    embedding = head_weight = _ends_tensor(files, names[0], facts.vocab_size, facts.hidden_size).to(device, kind)
    if not config.tie_word_embeddings:
        head_weight = _ends_tensor(files, "lm_head.weight", facts.vocab_size, facts.hidden_size).to(device, kind)
    packed = PackedLinear(head_weight)

    @torch.inference_mode()
    def head(hidden: torch.Tensor) -> torch.Tensor:
        return packed(hidden).float()

    return TargetShare(embedding, head, head_weight, facts.vocab_size, facts.hidden_size, facts.num_layers)
