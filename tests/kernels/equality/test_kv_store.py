"""Storing keys and values: bit-equal to the reference, and nothing else of the cache or of the input is touched."""

import pytest
import torch

from dflash2_kernels import kv_store as module
from dflash2_kernels.kv_store import kv_store, kv_store_reference
from dflash2_kernels.triton_import import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def operands(num_rows, kv_heads, head_dim, dtype, num_slots=40):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(num_rows, 2, kv_heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(num_slots, generator=generator)[:num_rows]
    cache = torch.randn(num_slots, 2, kv_heads, head_dim, generator=generator).to(dtype)
    return kv.to(DEVICE), slots.to(DEVICE), cache.to(DEVICE)


def test_the_kernel_is_what_runs_here():
    assert module.OPERATOR.implementation(DEVICE) in ("triton", "triton interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "head_dim"), [(0, 2, 8), (1, 1, 1), (5, 3, 24), (7, 5, 160), (9, 8, 128)]
)
def test_is_its_reference(num_rows, kv_heads, head_dim, dtype):
    kv, slots, cache = operands(num_rows, kv_heads, head_dim, dtype)
    expected = cache.clone()
    kv_store_reference(kv, slots, expected)
    kv_store(kv, slots, cache)
    assert torch.equal(cache, expected)
    assert torch.equal(cache[slots], kv)


def test_padding_touches_nothing():
    kv, slots, cache = operands(6, 2, 16, torch.float32)
    before = cache.clone()
    slots[1], slots[4], slots[5] = -1, -(1 << 40), 40
    reference = cache.clone()
    kv_store(kv, slots, cache)
    kv_store_reference(kv, slots, reference)
    assert torch.equal(cache, reference)
    stored = slots[[0, 2, 3]]
    assert torch.equal(cache[stored], kv[[0, 2, 3]])
    others = torch.ones(40, dtype=torch.bool, device=DEVICE)
    others[stored] = False
    assert torch.equal(cache[others], before[others])


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_of_a_wider_cache_and_a_slice_of_a_wider_product(layer):
    kv, slots, cache = operands(5, 2, 16, torch.bfloat16)
    product = torch.full((5, 9, 16), 9.0, dtype=torch.bfloat16, device=DEVICE)
    product[:, 3:7] = kv.flatten(1, 2)
    layers = torch.stack([cache, cache + 1, cache + 2], dim=1)
    expected = layers.clone()
    kv_store_reference(kv, slots, expected[:, layer])
    kv_store(product[:, 3:7].unflatten(1, (2, 2)), slots, layers[:, layer])
    assert torch.equal(layers, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(5, 2, 3, 16)}, "cache"),
        ({0: torch.zeros(5, 1, 2, 16)}, "cache"),
        ({1: torch.zeros(4, dtype=torch.int64)}, "slots"),
        ({1: torch.zeros(5, dtype=torch.int32)}, "int64"),
        ({0: torch.zeros(5, 2, 2, 16, dtype=torch.bfloat16)}, "one type"),
        ({0: torch.zeros(5, 2, 2, 32)[..., ::2]}, "contiguous"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    own = list(operands(5, 2, 16, torch.float32))
    for index, value in change.items():
        own[index] = value
    with pytest.raises(ValueError, match=f"kv_store: .*{message}"):
        kv_store(*own)
