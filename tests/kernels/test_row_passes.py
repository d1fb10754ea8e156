"""The passes between a layer's products in C: each is its definition in fp64, and a row's bits are its own."""

import pytest
import torch
from torch.nn import functional as F

from dflash2_kernels import row_passes

pytestmark = pytest.mark.skipif(not row_passes.available(), reason="needs AVX512-bf16 without AMX, and a C compiler")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [1, 15, 16, 64, 577])
def test_norm(width, weighted):
    x, weight = random(3, 5, width) * 4, random(width, seed=1) if weighted else None
    wide = None if weight is None else weight.double()
    got = row_passes.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got.double(), F.rms_norm(x.double(), (width,), wide, 1e-5), rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1, 2], row_passes.rms_norm(x[1, 2:3], weight, 1e-5)[0])
    apart = random(5, 3, width).transpose(0, 1)
    assert torch.equal(row_passes.rms_norm(apart, weight, 1e-5), row_passes.rms_norm(apart.contiguous(), weight, 1e-5))
    assert row_passes.rms_norm(x[:0], weight, 1e-5).shape == (0, 5, width)


@pytest.mark.parametrize("width", [1, 15, 16, 577])
def test_gated_activation(width):
    both = random(6, 2 * width) * 10
    both[0, 0], both[1, 0], both[2, 0] = 200.0, -200.0, float("nan")
    gate, up = both.double().chunk(2, 1)
    got = row_passes.silu_gate(both)
    torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert torch.equal(got[4:5], row_passes.silu_gate(both[4:5]))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 16), (2, 2, 256), (3, 1, 48)])
def test_rotation_and_store(heads, kv_heads, dim, normed):
    qkv, angles = random(5, heads + 2 * kv_heads, dim), random(5, 1, dim, seed=1)
    cos, sin = angles.cos(), angles.sin()
    head_norm = random(heads + kv_heads, dim, seed=2) if normed else None
    cache, slots = torch.full((20, 2, kv_heads, dim), 7.0), torch.tensor([19, 0, 6])
    query = row_passes.rotate_and_store(qkv, head_norm, 1e-5, cos, sin, slots, cache)
    qk = qkv[:3, : heads + kv_heads].double()
    if head_norm is not None:
        qk = F.rms_norm(qk, (dim,), None, 1e-5) * head_norm.double()
    rotated = qk * cos[:3].double() + qk.roll(dim // 2, -1) * sin[:3].double()
    torch.testing.assert_close(query[:3].double(), rotated[:, :heads], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[slots, 0].double(), rotated[:, heads:], rtol=1e-5, atol=1e-5)
    assert torch.equal(cache[slots, 1], qkv[:3, heads + kv_heads :])
    untouched = torch.ones(20, dtype=torch.bool).index_fill(0, slots, False)
    assert (cache[untouched] == 7.0).all()
    alone = torch.zeros_like(cache)
    row = slice(1, 2)
    own = row_passes.rotate_and_store(qkv[row], head_norm, 1e-5, cos[row], sin[row], slots[row], alone)
    assert torch.equal(own[0], query[1])
    assert torch.equal(alone[0], cache[0])


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"rms_norm: expected fp32 on a CPU, got torch.bfloat16"):
        row_passes.rms_norm(torch.zeros(2, 4, dtype=torch.bfloat16), None, 1e-5)
    with pytest.raises(ValueError, match=r"expected weight \[4\], got \[3\]"):
        row_passes.rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-5)
    qkv, table, cache = torch.zeros(2, 3, 16), torch.zeros(2, 1, 16), torch.zeros(4, 2, 1, 16)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=rf"slots below 4, got \[0, {bad}\]"):
            row_passes.rotate_and_store(qkv, None, 0.0, table, table, torch.tensor([0, bad]), cache)
    assert (cache == 0).all()
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"expected cos \[2, 1, 16\], got \[1, 1, 16\]"):
        row_passes.rotate_and_store(qkv, None, 0.0, table[:1], table, slots, cache)
    with pytest.raises(ValueError, match=r"expected qkv \[2, 3, 16\], got \[1, 3, 16\]"):
        row_passes.rotate_and_store(qkv[:1], None, 0.0, table[:1], table[:1], slots, cache)
    with pytest.raises(ValueError, match="0 heads of 16"):
        row_passes.rotate_and_store(qkv[:, :2], None, 0.0, table, table, slots, cache)
