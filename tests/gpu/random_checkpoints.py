"""Checkpoints of a real shape without their gigabytes: true configs and headers on disk, weights drawn on the device when they are read.

The safetensors files are sparse: header and size are real, no byte of a weight is ever written or read.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from sizes import Sizes

from dflash2_ray.models.drafter_checkpoint import expected_shapes
from dflash2_ray.models.drafter_config import read_drafter_config
from dflash2_ray.models.tensor_files import TensorFiles


def make_pair(folder: Path, size: Sizes) -> tuple[str, str]:
    """(target, drafter): a Qwen3-shaped target and a DFlash 2 drafter for it."""
    shape = {
        "model_type": "qwen3", "dtype": "bfloat16", "hidden_size": size.hidden, "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "vocab_size": size.vocab,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "hidden_act": "silu",
    }  # fmt: skip
    target, drafter = folder / "target", folder / "drafter"
    _write(
        target,
        {
            **shape,
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": size.target_layers,
            "tie_word_embeddings": True,
        },
    )
    _write(drafter, {
        **shape, "architectures": ["DFlash2DraftModel"], "num_hidden_layers": size.drafter_layers, "num_target_layers": size.target_layers,
        "dflash_config": {
            "block_size": size.draft_block, "mask_token_id": size.vocab - 1, "target_layer_ids": list(size.taps),
            "conv_kernel_size": size.conv_taps, "conv_group_size": size.conv_group, "selector_rank": size.rank, "selector_top_k": size.candidates,
        },
    })  # fmt: skip
    _write_header(target, _target_shapes(size))
    _write_header(drafter, expected_shapes(read_drafter_config(drafter)))
    return str(target), str(drafter)


def _write(folder: Path, config: Mapping[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def _target_shapes(size: Sizes) -> dict[str, tuple[int, ...]]:
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    layer = {
        "input_layernorm": (size.hidden,), "post_attention_layernorm": (size.hidden,), "self_attn.q_proj": (queries, size.hidden),
        "self_attn.k_proj": (keys, size.hidden), "self_attn.v_proj": (keys, size.hidden), "self_attn.o_proj": (size.hidden, queries),
        "self_attn.q_norm": (size.head_dim,), "self_attn.k_norm": (size.head_dim,), "mlp.gate_proj": (size.intermediate, size.hidden),
        "mlp.up_proj": (size.intermediate, size.hidden), "mlp.down_proj": (size.hidden, size.intermediate),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocab, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    for index in range(size.target_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _write_header(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        count = 2
        for one in shape:
            count *= one
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


@contextmanager
def drawn_weights(device: str) -> Iterator[None]:
    """Every tensor that is read is drawn on `device`, the same values at every reading: norms are ones, matrices keep their input's size."""

    def read(self, name, shape=None, *, rows=None, columns=None):
        full = self.shapes[name]
        if "norm" in name and len(full) == 1:
            value = torch.ones(full, dtype=torch.bfloat16, device=device)
        else:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            scale = 1.0 if "codebook" in name else full[-1] ** -0.5
            value = torch.empty(full, dtype=torch.bfloat16, device=device).normal_(generator=generator).mul_(scale)
        return value[rows or slice(None)] if columns is None else value[rows or slice(None), columns]

    with patch.object(TensorFiles, "read", read):
        yield
