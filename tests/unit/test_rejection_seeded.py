"""Verification with the real seeding code: emitted tokens follow p (chi-square, B04 and B05), and the same test fails
when noise is shared between purposes or when the q handed over is not the one that the drafts were drawn from."""

import pytest
import torch
from scipy.stats import chi2

from dflash2_kernels.selector_walk import inverse_cdf
from dflash2_ray.sampling.noise import Purpose, uniforms
from dflash2_ray.sampling.rejection import VerifyRows, verify

POSITION = 7


def rows_of(requests, position):
    """VerifyRows of [(drafts, ids, q, seed)] at one position, no options."""
    count = len(requests)
    return VerifyRows(
        num_drafts=[len(request[0]) for request in requests],
        drafts=[list(request[0]) for request in requests],
        candidate_ids=[request[1] for request in requests],
        candidate_probs=[request[2] for request in requests],
        temperature=[1.0] * count,
        top_k=[0] * count,
        top_p=[1.0] * count,
        min_p=[0.0] * count,
        seed=[request[3] for request in requests],
        first_position=[position] * count,
        matching=[False] * count,
    )


# The cuts below are those of p = 0.001. With so many draws a deviation of sum((law - p)^2 / p) = 0.0059, 0.0076 and 0.0145 (2, 7 and 63
# degrees of freedom) is found with probability 0.99; the least of the mutants deviates by 0.02, the others by 0.05 to 0.8.
DRAWS = 6_000


def statistic(tokens, law):
    counts = torch.bincount(torch.tensor(tokens), minlength=len(law)).double()
    law = law.double()
    assert counts[law == 0].sum() == 0, "a token of probability zero was emitted"
    expected = law[law > 0] * len(tokens)
    return float(((counts[law > 0] - expected) ** 2 / expected).sum())


def first_tokens(p, q, purpose=Purpose.DRAFT, told=None, draws=DRAWS, rule="standard"):
    """First tokens of one-draft requests, drafts from q by the drafter's seeding; `told`: the q handed over."""
    drafts = inverse_cdf(q.expand(draws, -1), uniforms(range(draws), [POSITION] * draws, purpose)).tolist()
    ids, probs = torch.arange(len(p))[None], (q if told is None else told)[None]
    rows = rows_of([((d,), ids, probs, i) for i, d in enumerate(drafts)], POSITION)
    verdict = verify(p.log().repeat(2 * draws, 1), rows, rule)
    return [d if a else t for d, a, t in zip(drafts, verdict.num_accepted, verdict.next_token, strict=True)]


P3, Q3 = torch.tensor([0.1, 0.4, 0.5]), torch.tensor([0.6, 0.3, 0.1])


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_b04_draft_accept_and_replacement_noise_are_independent(rule):
    assert statistic(first_tokens(P3, Q3, rule=rule), P3) < 13.8


@pytest.mark.parametrize("purpose", [Purpose.RESIDUAL, Purpose.ACCEPT])
def test_b04_shared_noise_is_seen(purpose):
    assert statistic(first_tokens(P3, Q3, purpose, draws=DRAWS), P3) > 13.8


P8 = torch.tensor([0.02, 0.08, 0.30, 0.05, 0.15, 0.20, 0.10, 0.10])
Q8 = torch.tensor([0.20, 0.25, 0.05, 0.05, 0.10, 0.15, 0.15, 0.05])
TOP3 = torch.where(Q8 >= 0.15, Q8, torch.zeros(8)) * torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 0])
TOP3 = TOP3 / TOP3.sum()
SHARP = Q8**2 / (Q8**2).sum()


@pytest.mark.parametrize("q", [TOP3, SHARP], ids=["top3", "sharp"])
def test_b05_the_very_q_of_the_draft_passes(q):
    assert statistic(first_tokens(P8, q), P8) < 24.3


@pytest.mark.parametrize("q", [TOP3, SHARP], ids=["top3", "sharp"])
def test_b05_another_q_fails(q):
    assert statistic(first_tokens(P8, q, told=Q8, draws=DRAWS), P8) > 24.3


def joint_statistic(told_second, draws):
    """Positions 1 and 2, p and q of the second depending on the first; a rejected first draft is followed by a plain
    step, as in the engine. `told_second(q2, d1)`: the rows handed over as q of the second slot."""
    generator = torch.Generator().manual_seed(8)
    p2, q2 = (torch.softmax(torch.randn(8, 8, generator=generator) * 1.2, -1) for _ in range(2))
    noise = [uniforms(range(draws), [POSITION + slot] * draws, Purpose.DRAFT) for slot in (0, 1)]
    d1 = inverse_cdf(Q8.expand(draws, -1), noise[0])
    d2 = inverse_cdf(q2[d1], noise[1])
    told = torch.stack([Q8.expand(draws, -1), told_second(q2, d1)], 1)
    ids = torch.arange(8).repeat(2, 1)
    logits = torch.stack([P8.expand(draws, -1), p2[d1], P8.expand(draws, -1)], 1).log().reshape(-1, 8)
    d1, d2 = d1.tolist(), d2.tolist()
    rows = rows_of([((d1[i], d2[i]), ids, told[i], i) for i in range(draws)], POSITION)
    verdict = verify(logits, rows)
    pairs, short = [], []
    for i, (accepted, token) in enumerate(zip(verdict.num_accepted, verdict.next_token, strict=True)):
        if accepted == 0:
            short.append((i, token))
        else:
            pairs.append(d1[i] * 8 + (d2[i] if accepted == 2 else token))
    after = verify(
        p2[[token for _, token in short]].log(), rows_of([((), None, None, i) for i, _ in short], POSITION + 1)
    )
    pairs += [token * 8 + second for (_, token), second in zip(short, after.next_token, strict=True)]
    return statistic(pairs, (P8[:, None] * p2).reshape(-1))


CUT = chi2.ppf(0.999, 63)


def test_b05_joint_law_of_two_positions():
    assert joint_statistic(lambda q2, d1: q2[d1], DRAWS) < CUT


def test_b05_a_q_that_forgets_its_predecessor_fails():
    assert joint_statistic(lambda q2, d1: (Q8 @ q2).expand(len(d1), -1), DRAWS) > CUT
    assert joint_statistic(lambda q2, d1: q2[(d1 + 1) % 8], DRAWS) > CUT
