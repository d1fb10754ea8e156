"""The rejection kernels against their reference: every integer equal, for all options, ragged requests and awkward rows."""

import pytest
import torch

from dflash2_kernels.rejection import OPERATOR, RejectionRows, sparse_rejection, sparse_rejection_reference

OPTIONS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.9, 0, 1.0, 0.1),
    (1.0, 50, 0.8, 0.05),
    (2.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (0.5, 10**6, 0.999, 1.0),
]


def problem(num_requests, num_slots, num_candidates, vocab, device, seed=0, levels=None):
    """Requests with 0 … num_slots drafts, q near p so that some drafts stand, options in turn."""
    generator = torch.Generator().manual_seed(seed)
    counts = [num_slots - r % (num_slots + 1) for r in range(num_requests)]
    first_row = (torch.tensor([0, *counts]).cumsum(0) + torch.arange(num_requests + 1)).int()
    logits = torch.randn(int(first_row[-1]), vocab, generator=generator) * 3
    if levels is not None:
        logits = (logits * levels / 3).round() / levels
    ids = torch.full((num_requests, num_slots, num_candidates), -1)
    probs = torch.zeros(num_requests, num_slots, num_candidates)
    drafts = torch.zeros(num_requests, num_slots, dtype=torch.int64)
    for r in range(num_requests):
        for slot in range(counts[r]):
            row = logits[first_row[r] + slot]
            best = row.topk(min(num_candidates, vocab)).indices
            near = row[best] + torch.randn(len(best), generator=generator)
            ids[r, slot, : len(best)] = best
            probs[r, slot, : len(best)] = near.softmax(-1)
            drafts[r, slot] = best[torch.multinomial(near.softmax(-1), 1, generator=generator)]
    chosen = [OPTIONS[r % len(OPTIONS)] for r in range(num_requests)]
    return logits.to(device), RejectionRows(
        first_row.to(device), drafts.to(device), ids.to(device), probs.to(device),
        *(torch.tensor([one[i] for one in chosen], dtype=torch.int32 if i == 1 else torch.float32, device=device) for i in range(4)),
        seeds=torch.tensor([(r * 0x9E3779B97F4A7C15 + seed) % 2**64 - 2**63 for r in range(num_requests)], device=device),
        positions=torch.arange(num_requests, device=device) * 1000 + 2**32 - 3,
    )  # fmt: skip


def agree(logits, rows):
    assert OPERATOR.uses_kernel(logits)
    accepted, token = sparse_rejection(logits, rows)
    expected_accepted, expected_token = sparse_rejection_reference(logits, rows)
    assert accepted.tolist() == expected_accepted.tolist()
    assert token.tolist() == expected_token.tolist()
    return accepted.tolist(), token.tolist()


@pytest.mark.parametrize(
    "shape", [(9, 3, 4, 50), (9, 7, 16, 4100), (9, 2, 1, 7), (9, 1, 128, 2049), (1, 0, 1, 3), (9, 4, 3, 1)], ids=str
)
def test_every_integer_is_equal(shape, device):
    agree(*problem(*shape, device))


def test_drafts_stand_and_fall(device):
    accepted, tokens = zip(*(agree(*problem(18, 3, 8, 300, device, seed)) for seed in range(2)), strict=True)
    flat = [one for part in accepted for one in part]
    assert set(flat) == {0, 1, 2, 3}
    assert len({one for part in tokens for one in part}) > 15


@pytest.mark.parametrize("levels", [1, 4])
def test_ties(levels, device):
    agree(*problem(9, 2, 8, 1100, device, levels=levels))


def test_masked_logits(device):
    logits, rows = problem(18, 3, 8, 400, device)
    logits[:, torch.arange(400) % 3 != 0] = float("-inf")
    logits[5, 1:] = float("-inf")
    _, tokens = agree(logits, rows)
    assert all(token % 3 == 0 for token in tokens)


def test_a_certain_draft_of_probability_zero_falls(device):
    logits, rows = problem(9, 1, 1, 60, device)
    falls = [r for r in range(9) if rows.first_row[r + 1] - rows.first_row[r] == 2]
    for r in falls:
        logits[rows.first_row[r], 17] = float("-inf")
        rows.drafts[r, 0], rows.candidate_ids[r, 0, 0], rows.candidate_probs[r, 0, 0] = 17, 17, 1.0
    accepted, tokens = agree(logits, rows)
    assert falls
    assert all(accepted[r] == 0 and tokens[r] != 17 for r in falls)


def test_a_request_does_not_depend_on_the_others(device):
    logits, rows = problem(9, 3, 4, 500, device)
    accepted, tokens = agree(logits, rows)
    for r in range(9):
        own = slice(r, r + 1)
        first = rows.first_row[r : r + 2]
        alone = RejectionRows(first - first[0], *(one[own] for name, one in vars(rows).items() if name != "first_row"))
        assert agree(logits[first[0] : first[1]], alone) == ([accepted[r]], [tokens[r]])


def test_any_layout_of_the_logits(strided, device):
    logits, rows = problem(9, 2, 4, 333, device)
    assert agree(strided(logits), rows) == agree(logits, rows)


def test_no_requests(device):
    logits, rows = problem(1, 1, 1, 5, device)
    none = RejectionRows(rows.first_row[:1], *(one[:0] for name, one in vars(rows).items() if name != "first_row"))
    accepted, token = sparse_rejection(logits[:0], none)
    assert accepted.shape == token.shape == (0,)
