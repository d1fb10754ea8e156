"""The matching rule: the text is a function of p, seed and position alone, whatever is drafted; its law is p under every
option; and racing with the same noise lets drafts stand about as often as the standard rule does."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from dflash2_kernels.selector_walk import inverse_cdf
from dflash2_ray.sampling import rejection
from dflash2_ray.sampling.noise import Purpose, uniforms
from dflash2_ray.sampling.rejection import VerifyRows, verify
from dflash2_ray.sampling.token_noise import exponentials, race
from dflash2_ray.sampling.transforms import target_probs

VOCAB = 8
OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.85, "min_p": 0.05},
]


def rows_of(requests):
    """VerifyRows of [(drafts, ids, q, options)]; matching unless the options say otherwise."""

    def option(name, default):
        return [request[3].get(name, default) for request in requests]

    return VerifyRows(
        num_drafts=[len(request[0]) for request in requests],
        drafts=[list(request[0]) for request in requests],
        candidate_ids=[request[1] for request in requests],
        candidate_probs=[request[2] for request in requests],
        temperature=option("temperature", 1.0),
        top_k=option("top_k", 0),
        top_p=option("top_p", 1.0),
        min_p=option("min_p", 0.0),
        seed=option("seed", 0),
        first_position=option("position", 0),
        matching=option("matching", True),
    )


# ---- which drafts stand, exactly --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_every_block_of_drafts_and_every_draw(monkeypatch, slots):
    """All drafts times all target draws of a tiny vocabulary: what is emitted is the draws, as far as drafts equal them."""
    vocab = 3 if slots < 3 else 2
    for drawn in itertools.product(range(vocab), repeat=slots + 1):
        monkeypatch.setattr(rejection, "race", lambda probs, seeds, positions, drawn=drawn: list(drawn))
        for drafts in itertools.product(range(vocab), repeat=slots):
            verdict = verify(torch.zeros(slots + 1, 3), rows_of([(drafts, None, None, {})]))
            accepted = verdict.num_accepted[0]
            assert (*drafts[:accepted], verdict.next_token[0]) == drawn[: accepted + 1]
            assert accepted == slots or drafts[accepted] != drawn[accepted]


# ---- a language, a drafter, and the texts they make -------------------------------------------------------------------

LANGUAGE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5  # logits behind each token
DRAFTED = LANGUAGE + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 0.7
FIRST = 5  # the absolute position of the first token that is decided; token 0 stands before it


def racing(temperature=1.0, temper=lambda noise: noise):
    """A drafter that races over its four best tokens."""

    def draft(seed, position, previous):
        ids = DRAFTED[previous].topk(4).indices.sort().values
        q = torch.softmax(DRAFTED[previous, ids] / temperature, -1)
        return int(ids[(q / temper(exponentials([seed], [position], ids[None])[0])).argmax()])

    return draft


DRAFTERS = {
    "racing": racing(),
    "another temperature": racing(3.0),
    "noise upside down": racing(temper=lambda noise: 1 / noise),
    "noise of another position": lambda seed, position, previous: racing()(seed, position + 1, previous),
    "constant": lambda seed, position, previous: 3,
    "the least likely": lambda seed, position, previous: int(LANGUAGE[previous].argmin()),
    "by its own uniforms": lambda seed, position, previous: int(
        inverse_cdf(torch.softmax(DRAFTED[previous], -1)[None], uniforms([seed], [position], Purpose.DRAFT))
    ),
}


def texts(seeds, length, draft=None, width=3, options=OPTIONS[0]):
    """(text of each seed, accepted drafts): all seeds decode side by side, `width` drafts a step."""
    text = {seed: [] for seed in seeds}
    total = 0
    while running := [seed for seed in seeds if len(text[seed]) < length]:
        requests, logits = [], []
        for seed in running:
            path = [text[seed][-1] if text[seed] else 0]
            position = FIRST + len(text[seed])
            for slot in range(width if draft else 0):
                path.append(draft(seed, position + slot, path[-1]))
            logits.append(LANGUAGE[path])
            requests.append((path[1:], None, None, {**options, "seed": seed, "position": position}))
        verdict = verify(torch.cat(logits), rows_of(requests))
        for seed, request, accepted, token in zip(
            running, requests, verdict.num_accepted, verdict.next_token, strict=True
        ):
            text[seed] += [*request[0][:accepted], token]
            total += accepted
    return {seed: tuple(one[:length]) for seed, one in text.items()}, total


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_text_is_the_same_whatever_is_drafted(options):
    plain, _ = texts(range(25), 10, options=options)
    assert len(set(plain.values())) > 20
    for width, draft in zip(itertools.cycle((1, 3, 7)), DRAFTERS.values(), strict=False):
        assert texts(range(25), 10, draft, width, options)[0] == plain
    assert texts([17], 10, DRAFTERS["racing"], 3, options)[0][17] == plain[17]


def test_shared_noise_is_what_lets_drafts_stand():
    accepted = {name: texts(range(40), 12, draft)[1] for name, draft in DRAFTERS.items()}
    for name in (
        "noise upside down",
        "noise of another position",
        "constant",
        "the least likely",
        "by its own uniforms",
    ):
        assert accepted[name] < 0.75 * accepted["racing"], (name, accepted)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_law_is_p(options):
    """Joint law of three tokens, found with one draft a step, against the product of p: chi-square, 4000 seeds."""
    draws = 4000
    every = ({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options).values()
    p = target_probs(LANGUAGE, *([value] * VOCAB for value in every)).double()
    law = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    emitted = []
    for seed_block in range(0, draws, 1000):
        emitted += texts(range(seed_block, seed_block + 1000), 3, DRAFTERS["constant"], 1, options)[0].values()
    counts = torch.bincount(torch.tensor([(a * VOCAB + b) * VOCAB + c for a, b, c in emitted]), minlength=VOCAB**3)
    assert counts[law == 0].sum() == 0
    expected = law * draws
    large = expected >= 5
    statistic = float(((counts[large] - expected[large]) ** 2 / expected[large]).sum())
    rest = float(expected[~large].sum())
    statistic += (float(counts[~large].sum()) - rest) ** 2 / rest if rest > 5 else 0.0
    assert statistic < chi2.ppf(0.9999, int(large.sum()))


# ---- mutants ----------------------------------------------------------------------------------------------------------


def _noise_by_row(monkeypatch):
    monkeypatch.setattr(rejection, "race", lambda probs, seeds, positions: race(probs, seeds, range(len(positions))))


def _noise_by_slot(monkeypatch):
    first = {}
    monkeypatch.setattr(
        rejection,
        "race",
        lambda probs, seeds, positions: race(
            probs, seeds, [p - first.setdefault((len(seeds), s), p) for s, p in zip(seeds, positions, strict=True)]
        ),
    )


def _accepts_by_probability(monkeypatch):
    def prefix(decided, drafts):
        count = 0
        while count < len(drafts) and LANGUAGE.softmax(-1)[:, drafts[count]].mean() > 0.1:
            count += 1
        return count, decided[count]

    monkeypatch.setattr(rejection, "_longest_prefix", prefix)


def _standard_rule(monkeypatch):
    original = rejection.verify
    monkeypatch.setitem(
        globals(), "verify", lambda logits, rows: original(logits, replace(rows, matching=[False] * len(rows.matching)))
    )


@pytest.mark.parametrize("mutate", [_noise_by_row, _noise_by_slot, _accepts_by_probability, _standard_rule])
def test_mutants_change_the_text(monkeypatch, mutate):
    mutate(monkeypatch)
    plain, _ = texts(range(30), 12)
    assert texts(range(30), 12, DRAFTERS["racing"])[0] != plain


# ---- how many drafts stand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.1, 0.3, 1.0, 3.0])
def test_acceptance_is_at_least_the_known_bound(sharpness):
    """P(y = draft) ≥ (1 - TV) / (1 + TV) for p and q that race with one noise (Daliri et al. 2408.07978), and it cannot
    exceed 1 - TV, which the standard rule reaches."""
    generator = torch.Generator().manual_seed(1)
    draws = 10_000
    for _ in range(4):
        p = torch.softmax(torch.randn(20, generator=generator), -1)
        q = torch.softmax(p.log() + sharpness * torch.randn(20, generator=generator), -1)
        distance = float((p - q).abs().sum() / 2)
        noise = exponentials(range(draws), [FIRST] * draws, torch.arange(20).expand(draws, -1))
        drafts = (q / noise).argmax(-1).tolist()
        rows = rows_of([((d,), None, None, {"seed": seed, "position": FIRST}) for seed, d in enumerate(drafts)])
        accepted = sum(verify(p.log().repeat(2 * draws, 1), rows).num_accepted) / draws
        error = 4 * (0.25 / draws) ** 0.5
        assert (1 - distance) / (1 + distance) - error < accepted < 1 - distance + error


# ---- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_verdict_does_not_depend_on_the_batch(rule):
    generator = torch.Generator().manual_seed(3)
    requests, logits = [], []
    for i in range(60):
        count = i % 5
        ids = torch.stack([torch.randperm(50, generator=generator)[:8] for _ in range(count)]) if count else None
        q = torch.softmax(torch.randn(count, 8, generator=generator), -1) if count else None
        drafts = ids.gather(1, q.argmax(-1, keepdim=True))[:, 0].tolist() if count else []
        own = torch.randn(count + 1, 50, generator=generator)
        for slot, draft in enumerate(drafts):
            own[slot, draft] += 4.0  # so that drafts often stand
        logits.append(own)
        kind = [
            {"temperature": 0.0},
            {"matching": False},
            {},
            {"top_k": 9, "top_p": 0.9},
            {"min_p": 0.1},
            {"temperature": 0.7},
        ]
        known = i % 6 == 1
        requests.append(
            (
                drafts,
                ids if known else None,
                q if known else None,
                {**kind[i % 6], "seed": i % 7, "position": 30 + i % 3},
            )
        )
    together = verify(torch.cat(logits), rows_of(requests), rule)
    alone = [verify(own, rows_of([request]), rule) for own, request in zip(logits, requests, strict=True)]
    assert together.num_accepted == [one.num_accepted[0] for one in alone]
    assert together.next_token == [one.next_token[0] for one in alone]
    assert len(set(together.num_accepted)) == 5, "the case should reach every length"
    order = list(reversed(range(60)))
    turned = verify(torch.cat([logits[i] for i in order]), rows_of([requests[i] for i in order]), rule)
    assert turned.next_token == [together.next_token[i] for i in order]


def test_a_greedy_request_stays_greedy_when_it_is_seeded():
    logits = torch.tensor([[0.0, 7.0, 7.0], [5.0, 0.0, 5.0]])
    verdict = verify(logits, rows_of([((1,), None, None, {"temperature": 0.0})]))
    assert (verdict.num_accepted, verdict.next_token) == ([1], [0])
