"""The shard's top k: values and ids equal to the reference, whatever the ties, and shards merged equal the whole."""

import pytest
import torch

from dflash2_kernels.vocab_topk import OPERATOR, merge_topk, vocab_topk, vocab_topk_reference

SHAPES = [(1, 1, 1), (1, 5, 5), (3, 17, 4), (2, 4096, 16), (2, 4097, 16), (3, 10000, 128), (0, 50, 3)]  # rows, ids, k


def logits(rows, ids, dtype, device, levels=None):
    generator = torch.Generator().manual_seed(0)
    if levels is None:
        return torch.randn(rows, ids, generator=generator).to(device, dtype)
    return (torch.randint(-levels, levels + 1, (rows, ids), generator=generator) / 2).to(device, dtype)


def same(got, expected):
    return torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[0].dtype == expected[0].dtype


@pytest.mark.parametrize("levels", [None, 1], ids=["distinct", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_reference(shape, dtype, levels, device):
    rows, ids, k = shape
    one = logits(rows, ids, dtype, device, levels)
    assert OPERATOR.uses_kernel(one)
    assert same(vocab_topk(one, k), vocab_topk_reference(one, k))


def test_infinities_and_both_zeros(device):
    one = torch.tensor(
        [[-0.0, 0.0, float("inf"), -1.0, float("-inf"), float("-inf")], [float("-inf")] * 5 + [0.0]], device=device
    )
    values, ids = vocab_topk(one, 5)
    assert ids.tolist() == [[2, 0, 1, 3, 4], [5, 0, 1, 2, 3]]
    assert same((values, ids), vocab_topk_reference(one, 5))


def test_a_view_of_a_padded_vocabulary(strided, device):
    one = logits(3, 500, torch.float32, device)
    assert same(vocab_topk(one[:, :333], 7), vocab_topk_reference(one[:, :333], 7))
    assert same(vocab_topk(strided(one), 7), vocab_topk_reference(one, 7))


@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "tied"])
def test_shards_merge_to_the_whole(levels, device):
    one, k = logits(4, 9000, torch.bfloat16, device, levels), 16
    parts = [vocab_topk(one[:, first : first + 3000], k, first) for first in (6000, 0, 3000)]
    merged = merge_topk(torch.cat([values for values, _ in parts], 1), torch.cat([ids for _, ids in parts], 1), k)
    assert same(merged, vocab_topk(one, k))
