"""Context ingest: the kernel against its reference and against the formula in double; padding rows touch nothing."""

import math

import pytest
import torch

from dflash2_kernels import context_ingest as module
from dflash2_kernels.context_ingest import context_ingest, store_context, store_context_reference
from dflash2_kernels.triton_import import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-6},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
}  # bf16: one unit in the last place
EPS = 1e-6


def operands(num_rows=5, layers=3, kv_heads=2, head_dim=16, dtype=torch.float32, num_slots=30):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    angles = torch.rand(num_rows, head_dim // 2, generator=generator) * 6
    cos, sin = (torch.cat([one, one], dim=1).to(dtype).to(DEVICE) for one in (angles.cos(), angles.sin()))
    slots = torch.randperm(num_slots, generator=generator)[:num_rows].to(DEVICE)
    return [
        normal(num_rows, layers, 2, kv_heads, head_dim), normal(layers, head_dim), cos, sin, slots,
        normal(num_slots, layers, 2, kv_heads, head_dim),
    ]  # fmt: skip


def test_the_kernel_is_what_runs_here():
    assert module.OPERATOR.implementation(DEVICE) in ("triton", "triton interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_scale", [1.0, 0.3])
@pytest.mark.parametrize(
    ("num_rows", "layers", "kv_heads", "head_dim"),
    [(0, 2, 1, 8), (1, 1, 1, 2), (5, 3, 2, 16), (3, 2, 3, 24), (4, 5, 8, 128)],
)
def test_is_its_reference(num_rows, layers, kv_heads, head_dim, value_scale, dtype):
    *own, cache = operands(num_rows, layers, kv_heads, head_dim, dtype)
    expected = cache.clone()
    store_context_reference(*own, expected, EPS, value_scale)
    store_context(*own, cache, eps=EPS, value_scale=value_scale)
    torch.testing.assert_close(cache, expected, **TOLERANCE[dtype])
    untouched = torch.ones(cache.shape[0], dtype=torch.bool)
    untouched[own[4].cpu()] = False
    assert torch.equal(cache[untouched], expected[untouched])


def test_is_the_formula():
    kv, norm, cos, sin, slots, cache = operands()
    store_context(kv, norm, cos, sin, slots, cache, eps=EPS, value_scale=0.5)
    for n in range(5):
        for layer in range(3):
            for head in range(2):
                x = kv[n, layer, 0, head].double()
                x = x / (x.square().mean() + EPS).sqrt() * norm[layer].double()
                turned = torch.cat([-x[8:], x[:8]])
                key = x * cos[n].double() + turned * sin[n].double()
                torch.testing.assert_close(cache[slots[n], layer, 0, head].double(), key, atol=1e-5, rtol=1e-5)
                assert torch.equal(cache[slots[n], layer, 1, head], kv[n, layer, 1, head] * 0.5)


def test_padding_touches_nothing():
    kv, norm, cos, sin, slots, cache = operands()
    slots[1], slots[3], slots[4] = -1, -(1 << 40), 30
    before = cache.clone()
    store_context(kv, norm, cos, sin, slots, cache, eps=EPS)
    written = slots[[0, 2]]
    others = torch.ones(30, dtype=torch.bool, device=DEVICE)
    others[written] = False
    assert torch.equal(cache[others], before[others])
    assert not torch.equal(cache[written], before[written])
    kv[[1, 3, 4]], cos[[1, 3, 4]] = math.nan, math.nan
    again = before.clone()
    store_context(kv, norm, cos, sin, slots, again, eps=EPS)
    assert torch.equal(again, cache)


def test_strided_operands():
    kv, norm, cos, sin, slots, cache = operands()
    expected = cache.clone()
    store_context(kv, norm, cos, sin, slots, expected, eps=EPS)
    by_layer = torch.empty(3, 30, 2, 2, 16, device=DEVICE).transpose(0, 1)
    by_layer.copy_(cache)
    wide = torch.zeros(5, 3, 2, 2, 40, device=DEVICE)[..., 7:23]
    wide.copy_(kv)
    tables = torch.zeros(5, 32, device=DEVICE)
    tables[:, :16], tables[:, 16:] = cos, sin
    store_context(wide, norm, tables[:, :16], tables[:, 16:], slots, by_layer, eps=EPS)
    assert torch.equal(by_layer, expected)


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_whole_operator(with_bias):
    _, key_norm, cos, sin, slots, cache = operands()
    generator = torch.Generator().manual_seed(1)
    rows, norm, projection, bias = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((5, 12), (12,), (3 * 2 * 2 * 16, 12), (3 * 2 * 2 * 16,))
    )
    expected = cache.clone()
    context = rows.double() / (rows.double().square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    kv = context @ projection.double().T + (bias.double() if with_bias else 0)
    store_context_reference(kv.float().view(5, 3, 2, 2, 16), key_norm, cos, sin, slots, expected, EPS, 0.7)
    context_ingest(
        rows, norm, projection, bias if with_bias else None, key_norm, cos, sin, slots, cache, eps=EPS, value_scale=0.7
    )
    torch.testing.assert_close(cache, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="context_ingest: expected rows"):
        context_ingest(rows[:, :11], norm, projection, None, key_norm, cos, sin, slots, cache, eps=EPS)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(5, 3, 2, 2, 15), "even D"),
        (0, torch.zeros(4, 3, 2, 2, 16), "slots"),
        (1, torch.zeros(2, 16), "key_norm"),
        (2, torch.zeros(5, 8), "tables"),
        (3, torch.zeros(4, 16), "tables"),
        (4, torch.zeros(5, dtype=torch.int32), "int64"),
        (1, torch.zeros(3, 32)[:, ::2], "contiguous"),
    ],
)
def test_operands_that_do_not_fit_are_refused(index, value, message):
    own = operands()
    own[index] = value.to(DEVICE) if value.is_contiguous() else torch.zeros(3, 32, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match=f"context_ingest: .*{message}"):
        store_context(*own, eps=EPS)
