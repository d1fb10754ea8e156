"""Transforms: p is the law that transformers' warpers give; ties keep the lower id; no row depends on its neighbours."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash2_ray.sampling.transforms import target_probs

TEMPERATURES = [1e-5, 0.05, 0.6, 1.0, 1.7, 100.0]
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 1e-6},
    {"top_p": 0.35},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 1, "top_p": 1e-6, "min_p": 1.0},
]


def ours(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = logits.shape[0]
    return target_probs(logits, [temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows)


def theirs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    dummy = torch.zeros(logits.shape[0], 1, dtype=torch.int64)
    return warpers(dummy, logits.double()).softmax(-1)


def random_logits(seed, rows, vocab, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_equals_transformers(options, temperature):
    for vocab in (2, 8, 259, 2048):
        logits = random_logits(vocab, 12, vocab)
        got, expected = ours(logits, temperature, **options), theirs(logits, temperature, **options)
        assert got.dtype == torch.float32
        assert not got[expected == 0].any()
        assert (got[expected > 1e-30] > 0).all()
        assert torch.allclose(got.double(), expected, atol=2e-6, rtol=1e-4)


@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(2, 300),
    temperature=st.floats(0.05, 20),
    top_k=st.integers(0, 320),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_equals_transformers_for_any_options(seed, vocab, temperature, top_k, top_p, min_p):
    logits = random_logits(seed, 3, vocab)
    got = ours(logits, temperature, top_k, top_p, min_p).double()
    expected = theirs(logits, temperature, top_k, top_p, min_p)
    assert torch.allclose(got.sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-5)
    # transformers subtracts top_p from 1 and we do not: a mass that meets the bound within rounding may fall either way
    below = theirs(logits, temperature, top_k, max(1e-9, top_p - 2e-6), min_p * (1 - 2e-6))
    above = theirs(logits, temperature, top_k, min(1.0, top_p + 2e-6), min(1.0, min_p * (1 + 2e-6)))
    clear = torch.equal(below > 0, above > 0)
    if clear:
        assert torch.allclose(got, expected, atol=3e-6, rtol=1e-4)


def test_transformers_comparison_can_fail():
    logits = random_logits(0, 4, 64)
    assert not torch.allclose(ours(logits, 1.0, top_k=5).double(), theirs(logits, 1.0, top_k=6), atol=3e-6)
    assert not torch.allclose(ours(logits, 1.0, top_p=0.6).double(), theirs(logits, 1.0, top_p=0.9), atol=3e-6)


def test_extremes_are_one_hot_at_the_argmax():
    logits = random_logits(1, 6, 50)
    best = torch.nn.functional.one_hot(logits.argmax(-1), 50).float()
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-9, "min_p": 1.0}):
        assert torch.equal(ours(logits, **options), best)
    assert torch.equal(ours(logits, 1e-5), best)


def test_options_that_are_off_leave_the_softmax():
    logits = random_logits(2, 6, 50)
    plain = torch.softmax(logits / torch.tensor(0.7), -1)
    assert torch.equal(ours(logits, 0.7), plain)
    assert torch.equal(ours(logits, 0.7, top_k=50), plain)
    assert torch.equal(ours(logits, 0.7, top_k=51), plain)
    assert torch.equal(ours(logits, 0.7, top_k=0, top_p=1.0, min_p=0.0), plain)


TIED = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 0.0]])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 6]),
        ({"top_k": 4}, [1, 2, 3, 6]),
        ({"top_k": 5}, [1, 2, 3, 4, 6]),
        ({"top_k": 7}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.3}, [1, 3]),
        ({"top_p": 0.75}, [1, 2, 3, 6]),
        ({"top_k": 5, "top_p": 0.7}, [1, 3, 6]),
        ({"min_p": 1.0}, [1, 3, 6]),
        ({"min_p": 0.3}, [1, 2, 3, 4, 5, 6]),
    ],
    ids=str,
)
def test_ties_at_the_boundary_keep_the_lower_id(options, kept):
    probs = ours(TIED, **options)[0]
    assert probs.nonzero()[:, 0].tolist() == kept
    expected = torch.zeros(8)
    expected[kept] = torch.softmax(TIED[0][kept], -1)
    assert torch.allclose(probs, expected, atol=1e-6)


def test_exact_mass_at_the_boundary_is_enough():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert (ours(logits, top_p=0.5)[0] > 0).tolist() == [True, False, False, False]
    assert (ours(logits, top_p=0.75)[0] > 0).tolist() == [True, True, False, False]
    assert (ours(logits, top_p=0.76)[0] > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("k", [1, 2, 7, 40, 999, 1000])
def test_exactly_k_tokens_stay_even_when_all_are_equal(k):
    probs = ours(torch.zeros(2, 1000), top_k=k)
    assert (probs > 0).sum(-1).tolist() == [k, k]
    assert (probs[:, :k] > 0).all()


def test_a_bigger_top_p_keeps_a_superset():
    logits = random_logits(3, 5, 500)
    kept = [ours(logits, top_p=p) > 0 for p in (0.1, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0)]
    for smaller, bigger in pairwise(kept):
        assert (bigger | ~smaller).all()
        assert bigger.sum() > smaller.sum()


def test_masked_tokens_stay_out():
    logits = random_logits(4, 3, 30)
    logits[:, 5:25] = -torch.inf
    for options in FILTERS:
        probs = ours(logits, **options)
        assert not probs[:, 5:25].any()
        assert torch.allclose(probs.sum(-1), torch.ones(3))


def mixed(rows, vocab):
    logits = random_logits(5, rows, vocab)
    options = [
        (
            TEMPERATURES[1 + i % 4],
            FILTERS[i % len(FILTERS)].get("top_k", 0),
            FILTERS[i % len(FILTERS)].get("top_p", 1.0),
            FILTERS[i % len(FILTERS)].get("min_p", 0.0),
        )
        for i in range(rows)
    ]
    return logits, options


@pytest.mark.parametrize("vocab", [8, 100, 2048, 49_152])
def test_rows_are_independent_bit_for_bit(vocab):
    rows = 33
    logits, options = mixed(rows, vocab)
    before = logits.clone()
    together = target_probs(logits, *zip(*options, strict=True))
    assert torch.equal(logits, before), "the logits are the caller's"
    for row in range(rows):
        alone = target_probs(logits[row : row + 1].clone(), *([value] for value in options[row]))
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    shuffled = target_probs(logits[order], *zip(*(options[i] for i in order.tolist()), strict=True))
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 17, 31, 32])
def test_row_count_changes_nothing(count):
    logits, options = mixed(33, 2048)
    together = target_probs(logits, *zip(*options, strict=True))
    assert torch.equal(target_probs(logits[:count], *zip(*options[:count], strict=True)), together[:count])
