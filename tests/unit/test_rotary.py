"""A drafter's rotary module is transformers', bit for bit, and a drafter starts without that library's models."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.dflash2 import _rotary_module

KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
}


def drafter(kind, **extra):
    """What a rotary module reads of a drafter's configuration."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **extra}
    return SimpleNamespace(hidden_size=64, num_heads=4, head_dim=32, max_position_embeddings=512, rope=rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers_bit_for_bit(kind, dtype):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = drafter(kind, **KINDS[kind])
    shape = Qwen3Config(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters=dict(config.rope),
    )
    like, positions = torch.empty(1, 1, dtype=dtype), torch.arange(1000)[None]
    expected = Qwen3RotaryEmbedding(shape)(like, positions)
    got = _rotary_module(config)(like, positions)
    assert len(expected) == len(got) == 2
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("config", [drafter("yarn"), drafter("default", rope_theta=None)], ids=["no factor", "no base"])
def test_parameters_that_cannot_be_used_are_told(config):
    with pytest.raises(CheckpointError, match="rope parameters"):
        _rotary_module(config)


def test_a_drafter_starts_without_the_library_of_models():
    code = """
import sys
from dflash2_ray.config import ServiceConfig
from dflash2_ray.runtime.build import build_drafter_runner, draw_blueprint
from dflash2_ray.runtime.warm_up import warm_up_drafter
warm_up_drafter(build_drafter_runner(draw_blueprint(ServiceConfig())), 3)
print([name for name in ("transformers.modeling_utils", "torch.distributed.tensor", "scipy") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
