"""Verification is lossless: the law that the real `verify` emits, found by exact enumeration, is p for any q, for both
rules; greedy keeps the longest prefix of argmaxes; no verdict depends on the batch around it."""

import itertools

import pytest
import torch
from scipy.stats import chi2

from dflash2_kernels.selector_walk import inverse_cdf
from dflash2_ray.sampling import rejection
from dflash2_ray.sampling.noise import Purpose
from dflash2_ray.sampling.rejection import VerifyRows, draw, verify

GRID = 2**24
LAST = 1 - 1 / GRID


def rows_of(requests):
    """VerifyRows of [(drafts, ids, q, options)]; options: temperature, top_k, top_p, min_p, seed, position."""

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
        matching=option("matching", False),
    )


# ---- exact enumeration ----------------------------------------------------------------------------------------------


class Probe:
    """`verify` on one request with the noise in our hands and the weights of its last draw in view."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(rejection, "all_uniforms", lambda seeds, positions: self.noise)
        monkeypatch.setattr(rejection, "draw", self._draw)

    def _draw(self, weights, uniform):
        self.weights = weights
        return 0

    def accepted(self, logits, rows, rule, accept_noise):
        self.noise = torch.zeros(4, len(accept_noise) + 1)
        self.noise[Purpose.ACCEPT, :-1] = torch.tensor(accept_noise)
        return verify(logits, rows, rule).num_accepted[0]

    def stop_law(self, logits, rows, rule):
        """[(probability, weights of the next token)] for 0 … S accepted drafts. Each test is a threshold on its own
        noise, found by bisection on the 24-bit grid, and each stop is provoked to see its weights."""
        count = rows.num_drafts[0]
        thresholds = []
        for slot in range(count):
            # standard: the tests before must pass to reach this one; block: all others fail, so that this one shows (one
            # that passes even at LAST hides it, and then it does not matter)
            others = [0.0 if rule == "standard" else LAST] * count
            low, high = 0, GRID  # passes below `low`, fails from `high` on
            while low < high:
                middle = (low + high) // 2
                noise = [*others[:slot], middle / GRID, *others[slot + 1 :]]
                if self.accepted(logits, rows, rule, noise) > slot:
                    low = middle + 1
                else:
                    high = middle
            thresholds.append(low / GRID)
        law = []
        for stop in range(count + 1):
            chance = 1.0
            if rule == "standard":  # the first failure ends it
                for slot in range(stop):
                    chance *= thresholds[slot]
                chance *= 1 - thresholds[stop] if stop < count else 1.0
                noise = [0.0] * stop + [LAST] * (count - stop)
            else:  # the longest prefix that passes stands
                chance = thresholds[stop - 1] if stop else 1.0
                for slot in range(stop, count):
                    chance *= 1 - thresholds[slot]
                noise = [LAST] * count
                if stop:
                    noise[stop - 1] = 0.0
            if chance > 0:
                assert self.accepted(logits, rows, rule, noise) == stop
                law.append((chance, self.weights.double() / self.weights.double().sum()))
            else:
                law.append((0.0, None))
        return law


def emitted_law(probe, rule, vocab, slots, p, q):
    """Joint law [vocab] * (slots + 1) of what a block emits, p behind it; p, q: prefix → row, q: (ids, probs)."""
    law = torch.zeros([vocab] * (slots + 1), dtype=torch.float64)
    for path in itertools.product(range(vocab), repeat=slots):
        chance, ids, probs = 1.0, [], []
        for slot in range(slots):
            one_ids, one_probs = q(path[:slot])
            chance *= float(one_probs[one_ids == path[slot]].sum())
            ids.append(one_ids)
            probs.append(one_probs)
        if chance == 0:
            continue
        logits = torch.stack([p(path[:slot]).log() for slot in range(slots + 1)])
        rows = rows_of([(path, torch.stack(ids), torch.stack(probs), {})])
        for stop, (stop_chance, weights) in enumerate(probe.stop_law(logits, rows, rule)):
            for token in range(vocab if stop_chance else 0):
                prefix = (*path[:stop], token)
                for rest in itertools.product(range(vocab), repeat=slots - stop):
                    end = 1.0
                    for i, one in enumerate(rest):
                        end *= float(p(prefix + rest[:i])[one])
                    law[prefix + rest] += chance * stop_chance * float(weights[token]) * end
    return law


def model(seed, vocab, kind):
    """Prefix → distribution, random but fixed. kind: dense, zeros, peaked."""
    cache = {}

    def row(prefix):
        if prefix not in cache:
            generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
            weights = torch.rand(vocab, generator=generator) + 0.02
            if kind == "peaked":
                weights = weights**6
            if kind == "zeros":
                weights[int(torch.randint(vocab, (), generator=generator))] = 0.0
            cache[prefix] = weights / weights.sum()
        return cache[prefix]

    return row


def drafter(seed, vocab, kind, p):
    """Prefix → (candidate ids, probabilities)."""
    if kind == "same":
        return lambda prefix: (torch.arange(vocab), p(prefix))
    own = model(seed, vocab, "zeros" if kind == "zeros" else "peaked" if kind in ("sparse", "peaked") else "dense")

    def row(prefix):
        ids = own(prefix).argsort(descending=True)
        ids = ids[:1] if kind == "one_hot" else ids[:2] if kind == "sparse" else ids
        return ids, own(prefix)[ids] / own(prefix)[ids].sum()

    return row


CASES = [
    (vocab, slots, p, q)
    for vocab, slots in ((5, 1), (3, 2), (2, 3))
    for p in ("dense", "zeros")
    for q in ("dense", "zeros", "sparse", "one_hot", "peaked", "same")
    if not (vocab == 2 and q == "sparse")
]


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize(("vocab", "slots", "p_kind", "q_kind"), CASES)
def test_the_emitted_law_is_exactly_p(monkeypatch, rule, vocab, slots, p_kind, q_kind):
    p = model(11, vocab, p_kind)
    q = drafter(23, vocab, q_kind, p)
    law = emitted_law(Probe(monkeypatch), rule, vocab, slots, p, q)
    for path in itertools.product(range(vocab), repeat=slots + 1):
        expected = 1.0
        for i, token in enumerate(path):
            expected *= float(p(path[:i])[token])
        assert abs(float(law[path]) - expected) < 3e-6
        if expected == 0:
            assert float(law[path]) == 0


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_enumeration_sees_a_q_that_is_not_the_drafters(monkeypatch, rule):
    p = model(11, 3, "dense")
    told, drawn = drafter(23, 3, "dense", p), drafter(24, 3, "dense", p)
    law = torch.zeros(3, dtype=torch.float64)
    probe = Probe(monkeypatch)
    for token in range(3):
        rows = rows_of([((token,), told(())[0][None], told(())[1][None], {})])
        chance = float(drawn(())[1][drawn(())[0] == token].sum())
        (reject, weights), (accept, _) = probe.stop_law(p(()).log().repeat(2, 1), rows, rule)
        law[token] += chance * accept
        law += chance * reject * weights if reject else 0.0
    assert float((law - p(()).double()).abs().max()) > 0.01


def test_the_block_rule_accepts_at_least_as_many():
    generator = torch.Generator().manual_seed(0)
    total = {"standard": 0, "block": 0}
    for seed in range(400):
        p, q = (torch.softmax(torch.randn(5, 6, generator=generator), -1) for _ in range(2))
        drafts = inverse_cdf(q[:4], torch.rand(4, generator=generator)).tolist()
        for rule in total:
            rows = rows_of([(drafts, torch.arange(6).repeat(4, 1), q[:4], {"seed": seed})])
            total[rule] += verify(p.log(), rows, rule).num_accepted[0]
    assert total["block"] > total["standard"]


def test_unknown_rule():
    with pytest.raises(ValueError, match="'standard' or 'block'"):
        verify(torch.zeros(2, 3), rows_of([((1,), None, None, {})]), "greedy")


# ---- the last draw --------------------------------------------------------------------------------------------------


def test_draw_is_the_inverse_cdf_and_never_takes_weight_zero():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for uniform, expected in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (LAST, 4), (1.0, 4)):
        assert draw(weights, uniform) == expected
        assert draw(weights * 1e-30, uniform) == expected
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 17, 1000, 50_000):
        weights = torch.rand(size, generator=generator) ** 8 * 1e-3
        weights[torch.rand(size, generator=generator) < 0.5] = 0.0
        weights[size // 2] = 1e-7
        for uniform in (0.0, 2**-24, 0.5, LAST, 1.0):
            assert weights[draw(weights, uniform)] > 0


def test_draw_follows_the_weights():
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0])
    counts = torch.zeros(4)
    for i in range(800):
        counts[draw(weights, (i + 0.5) / 800)] += 1
    assert counts.tolist() == [300, 0, 100, 400]


# ---- greedy, mixtures, no drafts ------------------------------------------------------------------------------------


def greedy_logits(*best):
    return torch.nn.functional.one_hot(torch.tensor(best), 6).float()


@pytest.mark.parametrize(
    ("drafts", "accepted", "token"),
    [((1, 2, 3), 3, 4), ((1, 2, 0), 2, 3), ((0, 2, 3), 0, 1), ((1, 0, 3), 1, 2), ((1, 2), 2, 3), ((), 0, 1)],
)
@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_keeps_the_longest_matching_prefix(drafts, accepted, token, temperature):
    logits = greedy_logits(1, 2, 3, 4)[: len(drafts) + 1]
    verdict = verify(logits, rows_of([(drafts, None, None, {"temperature": temperature})]))
    assert (verdict.num_accepted, verdict.next_token) == ([accepted], [token])


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0], [5.0, 0.0, 5.0, 5.0]])
    assert verify(logits, rows_of([((1,), None, None, {"temperature": 0.0})])).next_token == [0]
    other = verify(logits, rows_of([((2,), None, None, {"temperature": 0.0})]))
    assert (other.num_accepted, other.next_token) == ([0], [1])


def test_no_drafts_draws_from_p():
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    rows = rows_of([((), None, None, {"seed": seed, "position": 9}) for seed in range(4000)])
    verdict = verify(p.log().repeat(4000, 1), rows)
    assert set(verdict.num_accepted) == {0}
    counts = torch.bincount(torch.tensor(verdict.next_token), minlength=4)
    assert counts[1] == 0
    assert float(((counts - 4000 * p)[p > 0] ** 2 / (4000 * p[p > 0])).sum()) < chi2.ppf(0.999, 2)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_verdict_does_not_depend_on_the_batch(rule):
    generator = torch.Generator().manual_seed(3)
    requests, logits = [], []
    for i in range(60):
        count = i % 5
        q = torch.softmax(torch.randn(count, 8, generator=generator), -1)
        ids = torch.stack([torch.randperm(50, generator=generator)[:8] for _ in range(count)]) if count else None
        drafts = ids.gather(1, q.argmax(-1, keepdim=True))[:, 0].tolist() if count else []
        known = i % 3 and count
        options = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.1}][i % 4]
        requests.append(
            (drafts, ids if known else None, q if known else None, {**options, "seed": i, "position": 30 + i})
        )
        own = torch.randn(count + 1, 50, generator=generator)
        for slot, draft in enumerate(drafts):
            own[slot, draft] += 3.0  # so that drafts often stand
        logits.append(own)
    together = verify(torch.cat(logits), rows_of(requests), rule)
    alone = [verify(own, rows_of([request]), rule) for own, request in zip(logits, requests, strict=True)]
    assert together.num_accepted == [one.num_accepted[0] for one in alone]
    assert together.next_token == [one.next_token[0] for one in alone]
    assert len(set(together.num_accepted)) == 5, "the case should reach every length"
    order = list(reversed(range(60)))
    turned = verify(torch.cat([logits[i] for i in order]), rows_of([requests[i] for i in order]), rule)
    assert turned.next_token == [together.next_token[i] for i in order]
