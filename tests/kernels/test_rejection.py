"""The sparse-q operator decides as the service's own verification does, draft for draft and token for token, with the same noise."""

from dataclasses import replace

import pytest
import torch

from dflash2_kernels.integer_softmax import TOP_BITS, weights_reference
from dflash2_kernels.rejection import RejectionRows, sparse_rejection
from dflash2_ray.runtime.rejection_launch import RejectionLaunch
from dflash2_ray.sampling.rejection import VerifyRows, verify

VOCAB, SLOTS, CANDIDATES = 700, 5, 16
OPTIONS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 1.0, 0.0),
    (1.2, 0, 0.9, 0.0),
    (0.9, 0, 1.0, 0.1),
    (1.0, 40, 0.8, 0.02),
]


def problem(options, num_requests, seed):
    """(logits, the service's rows, the operator's rows) of ragged requests; every fourth has drafts without q."""
    generator = torch.Generator().manual_seed(seed)
    counts = [SLOTS - r % (SLOTS + 1) for r in range(num_requests)]
    logits = torch.randn(sum(counts) + num_requests, VOCAB, generator=generator) * 3
    ids, probs = torch.full((num_requests, SLOTS, CANDIDATES), -1), torch.zeros(num_requests, SLOTS, CANDIDATES)
    drafts = torch.zeros(num_requests, SLOTS, dtype=torch.int64)
    seeds = [(r * 0x9E3779B97F4A7C15 + seed) % 2**64 for r in range(num_requests)]
    first_row = [0]
    for r, count in enumerate(counts):
        for slot in range(count):
            row = logits[first_row[-1] + slot]
            best = row.topk(CANDIDATES).indices.sort().values
            q = (row[best] + torch.randn(CANDIDATES, generator=generator)).softmax(-1)
            drafts[r, slot] = best[torch.multinomial(q, 1, generator=generator)]
            if r % 4 == 3:
                ids[r, slot, 0], probs[r, slot, 0] = drafts[r, slot], 1.0
            else:
                ids[r, slot], probs[r, slot] = best, q
        first_row.append(first_row[-1] + count + 1)
    chosen = [options[r % len(options)] for r in range(num_requests)]
    columns = [[one[i] for one in chosen] for i in range(4)]
    positions = [r * 7 for r in range(num_requests)]
    known = [r % 4 != 3 for r in range(num_requests)]
    service = VerifyRows(
        counts, [drafts[r, :count].tolist() for r, count in enumerate(counts)],
        [ids[r, :count] if known[r] else None for r, count in enumerate(counts)],
        [probs[r, :count] if known[r] else None for r, count in enumerate(counts)],
        *columns, seeds, positions, [False] * num_requests,
    )  # fmt: skip
    signed = torch.tensor([one - (1 << 64) if one >> 63 else one for one in seeds])
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    tensors = (torch.tensor(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True))
    own = RejectionRows(
        torch.tensor(first_row, dtype=torch.int32), drafts, ids, probs, *tensors, signed, torch.tensor(positions)
    )
    return logits, service, own


@pytest.mark.parametrize("option", [*OPTIONS, None], ids=lambda one: "mixed" if one is None else str(one))
def test_decides_as_the_service_does(option):
    logits, service, own = problem(OPTIONS if option is None else [option], 240, seed=11)
    expected = verify(logits, service)
    accepted, tokens = sparse_rejection(logits, own)
    assert accepted.tolist() == expected.num_accepted
    assert tokens.tolist() == expected.next_token
    assert set(expected.num_accepted) >= ({0, 1} if option in OPTIONS[:1] else {0, 1, 2, 3})
    assert len(set(expected.next_token)) > 100


@pytest.mark.parametrize("num_requests", [1, 2, 7, 60])
def test_a_step_of_the_service_is_decided_at_once_as_one_by_one(num_requests):
    """Ragged drafts, some without q, some requests without any, greedy, drawn and matching ones side by side."""
    launch = RejectionLaunch("cpu")
    for seed in range(4):  # buffers of one size serve several steps
        logits, service, _ = problem(OPTIONS, num_requests, seed)
        service = replace(service, matching=[r % 5 == 4 for r in range(num_requests)])
        expected = verify(logits, service)
        assert verify(logits, service, at_once=launch.decide) == expected
    if num_requests == 60:
        assert set(expected.num_accepted) >= {0, 1, 2, 3}


def test_weights_are_a_softmax_to_the_precision_of_fp32():
    logits = torch.cat([torch.linspace(-60, 12, 5000), torch.tensor([float("-inf")])])
    for temperature in (0.3, 1.0, 1.7):
        weights, ranks = weights_reference(logits, torch.tensor(temperature))
        scaled = logits / torch.tensor(temperature)
        exact = torch.exp((scaled - scaled.max()).double()) * 2.0**TOP_BITS
        assert int(weights.max()) == 2**TOP_BITS
        assert ((weights.double() - exact).abs() <= exact * 2.0**-22 + 1).all()
        assert (weights.diff()[:-1] >= 0).all(), "monotone"
        assert int(weights[-1]) == 0
        assert len(set(ranks.tolist())) == len(ranks)
        assert (ranks.argsort(descending=True)[:4999] == torch.arange(4999, 0, -1)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_row", torch.zeros(3, dtype=torch.int64)),
        ("drafts", torch.zeros(2, 4, dtype=torch.int64)),
        ("candidate_probs", torch.zeros(2, SLOTS, CANDIDATES, dtype=torch.float64)),
        ("temperature", torch.ones(3)),
        ("seeds", torch.zeros(2)),
    ],
)
def test_what_does_not_fit_is_refused(name, value):
    logits, _, own = problem(OPTIONS, 2, 0)
    with pytest.raises(ValueError, match=f"sparse_rejection: expected {name}"):
        sparse_rejection(logits, RejectionRows(**{**vars(own), name: value}))
    with pytest.raises(ValueError, match="sparse_rejection: expected logits fp32"):
        sparse_rejection(logits.double(), own)
