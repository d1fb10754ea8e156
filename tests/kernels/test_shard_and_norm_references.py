"""The references of the vocabulary's top k and of addition and norm, against their definitions in Python and in double."""

import pytest
import torch

from dflash2_kernels.add_rms_norm import add_rms_norm, rms_norm
from dflash2_kernels.vocab_topk import merge_topk, vocab_topk


@pytest.mark.parametrize("levels", [1, 3, 1000])
@pytest.mark.parametrize(("ids", "k"), [(1, 1), (9, 9), (40, 6), (700, 16)])
def test_topk_is_a_sort_by_value_then_id(ids, k, levels):
    one = (torch.randint(-levels, levels, (5, ids), generator=torch.Generator().manual_seed(0)) / 4).float()
    values, found = vocab_topk(one, k, first_id=100)
    for row in range(5):
        expected = sorted(range(ids), key=lambda i, row=row: (-float(one[row, i]), i))[:k]
        assert found[row].tolist() == [100 + i for i in expected]
        assert values[row].tolist() == [float(one[row, i]) for i in expected]


def test_merged_shards_are_the_whole():
    one = torch.randint(0, 4, (3, 90), generator=torch.Generator().manual_seed(1)).float()
    parts = [vocab_topk(one[:, first : first + 30], 8, first) for first in (30, 0, 60)]
    values, ids = merge_topk(torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1), 8)
    whole = vocab_topk(one, 8)
    assert torch.equal(values, whole[0])
    assert torch.equal(ids, whole[1])


@pytest.mark.parametrize("k", [0, 5])
def test_topk_refuses_what_a_row_does_not_hold(k):
    with pytest.raises(ValueError, match=r"vocab_topk: .* got \(2, 4\), k"):
        vocab_topk(torch.zeros(2, 4), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_addition_and_norm_are_their_definition(dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(3, 4, 48, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(48, generator=generator).to(dtype)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(y.double(), exact, rtol=2e-6 if dtype == torch.float32 else 2.0**-8, atol=1e-9)
    assert torch.equal(y, rms_norm(total, weight, 1e-5)), "to the bit what the two operators gave"


def test_addition_and_norm_refuse_what_does_not_fit():
    for x, residual, weight in (
        (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4)),
        (torch.zeros(2, 4), torch.zeros(2, 4).bfloat16(), torch.zeros(4)),
        (torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(5)),
    ):
        with pytest.raises(ValueError, match="add_rms_norm"):
            add_rms_norm(x, residual, weight, 1e-6)
