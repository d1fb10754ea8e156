"""Verification: which drafts stand, and which token the target adds. Lossless for any drafter.

Standard rule (Leviathan et al. 2211.17192; Chen et al. 2302.01318), on sparse q: accept draft d of slot i iff
u·q_i(d) < p_i(d); at the first rejection draw from max(p_i - q_i, 0); behind a fully accepted block draw from the last
row's p. Block rule: Sun et al. 2403.10444. p carries every option of the request, q only its temperature; q is the very
row that the draft was drawn from.

Matching rule (Daliri et al. 2408.07978): every row draws its own token y from p with noise of (seed, position, token id), as
plain decoding does, and a draft stands iff it equals y. So the text is a function of p, seed and position alone, whatever
was drafted; drafts only decide how much of it one step finds. q is not used.

It must not know models, requests or steps.

Shapes: R requests, T rows of logits (request r owns num_drafts[r] + 1 of them), V vocabulary, S drafts, C candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflash2_ray.sampling.noise import Purpose, all_uniforms
from dflash2_ray.sampling.token_noise import race
from dflash2_ray.sampling.transforms import target_probs

GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class VerifyRows:
    """What is to be verified, one entry per request.

    candidate_ids, candidate_probs: [S, C] int64 / fp32, the realised q rows; None: q is one-hot at the draft.
    seed: 64-bit noise key. first_position: absolute position of the token that the request's first row decides.
    matching: the request is verified by token matching, whatever rule the others follow.
    """

    num_drafts: Sequence[int]
    drafts: Sequence[Sequence[int]]
    candidate_ids: Sequence[torch.Tensor | None]
    candidate_probs: Sequence[torch.Tensor | None]
    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    seed: Sequence[int]
    first_position: Sequence[int]
    matching: Sequence[bool]


@dataclass(frozen=True)
class Verdict:
    """num_accepted[r] drafts stand; next_token[r] follows them."""

    num_accepted: list[int]
    next_token: list[int]


Decide = Callable[[torch.Tensor, VerifyRows], Verdict]


def verify(logits: torch.Tensor, rows: VerifyRows, rule: str = "standard", at_once: Decide | None = None) -> Verdict:
    """Decide every request of the batch: logits fp32 [T, V] → Verdict. rule: `standard` or `block`, for requests that are
    neither greedy nor matching. at_once: decides greedy requests and those of the standard rule together, where there is such a thing.

    Greedy requests (temperature < 1e-5) keep the longest prefix that equals the argmax (lowest id among equals) and use
    no noise. Each request's result is a function of its own rows, options, seed and position only.
    """
    num_requests = len(rows.num_drafts)
    starts = [0]
    for count in rows.num_drafts:
        starts.append(starts[-1] + count + 1)
    greedy = [value < GREEDY_BELOW for value in rows.temperature]
    matching = [r for r in range(num_requests) if rows.matching[r] and not greedy[r]]
    sampled = [r for r in range(num_requests) if not rows.matching[r] and not greedy[r]]
    if sampled and at_once is not None and rule == "standard":
        verdict = at_once(logits, rows)
        accepted, tokens = verdict.num_accepted, verdict.next_token
    else:
        accepted, tokens = [0] * num_requests, [0] * num_requests
        best = logits.argmax(-1).tolist() if any(greedy) else []
        for r in range(num_requests):
            if greedy[r]:
                accepted[r], tokens[r] = _longest_prefix(best[starts[r] : starts[r + 1]], rows.drafts[r])
        if sampled:
            probs = _probabilities(logits, rows, starts, sampled)
            for r, own in zip(sampled, probs.split([rows.num_drafts[r] + 1 for r in sampled]), strict=True):
                accepted[r], tokens[r] = _verify_sampled(own, rows, r, rule)
    if matching:
        for r, drawn in zip(matching, _drawn(logits, rows, starts, matching), strict=True):
            accepted[r], tokens[r] = _longest_prefix(drawn, rows.drafts[r])
    return Verdict(accepted, tokens)


def _longest_prefix(decided: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """(drafts equal to the target's own tokens, the target's token behind them)."""
    count = 0
    for draft, token in zip(drafts, decided, strict=False):
        if draft != token:
            break
        count += 1
    return count, decided[count]


def _drawn(logits: torch.Tensor, rows: VerifyRows, starts: Sequence[int], matching: Sequence[int]) -> list[list[int]]:
    """The target's own token y at every row of the matching requests."""
    seeds = [rows.seed[r] for r in matching for _ in range(rows.num_drafts[r] + 1)]
    positions = [rows.first_position[r] + row for r in matching for row in range(rows.num_drafts[r] + 1)]
    tokens = iter(race(_probabilities(logits, rows, starts, matching), seeds, positions))
    return [[next(tokens) for _ in range(rows.num_drafts[r] + 1)] for r in matching]


def _probabilities(
    logits: torch.Tensor, rows: VerifyRows, starts: Sequence[int], sampled: Sequence[int]
) -> torch.Tensor:
    """p of every row of the given requests, one request after the other: fp32 [sum of num_drafts + 1, V]."""
    counts = [rows.num_drafts[r] + 1 for r in sampled]
    if sum(counts) != logits.shape[0]:
        picked = [row for r in sampled for row in range(starts[r], starts[r + 1])]
        logits = logits.index_select(0, torch.tensor(picked, device=logits.device))
    per_row = [r for r, count in zip(sampled, counts, strict=True) for _ in range(count)]
    return target_probs(
        logits,
        [rows.temperature[r] for r in per_row],
        [rows.top_k[r] for r in per_row],
        [rows.top_p[r] for r in per_row],
        [rows.min_p[r] for r in per_row],
    )


def _verify_sampled(probs: torch.Tensor, rows: VerifyRows, r: int, rule: str) -> tuple[int, int]:
    drafts = rows.drafts[r]
    count = len(drafts)
    first = rows.first_position[r]
    noise = all_uniforms([rows.seed[r]] * (count + 1), range(first, first + count + 1))
    if count == 0:
        return 0, draw(probs[0], float(noise[Purpose.BONUS, 0]))
    ids, q = _sparse_q(rows, r, probs.device)
    if rule == "standard":
        accepted = _accept_standard(probs, q, ids, drafts, noise[Purpose.ACCEPT].tolist())
        weight = 1.0
    elif rule == "block":
        accepted, weight = _accept_block(probs, q, ids, drafts, noise[Purpose.ACCEPT].tolist())
    else:
        raise ValueError(f"rule must be 'standard' or 'block', got {rule!r}")
    if accepted == count:
        return accepted, draw(probs[count], float(noise[Purpose.BONUS, count]))
    residual = (weight * probs[accepted]).index_add(0, ids[accepted], q[accepted], alpha=-1).clamp_min_(0)
    residual = torch.where(residual.sum() > 0, residual, probs[accepted])  # only rounding can empty it
    return accepted, draw(residual, float(noise[Purpose.RESIDUAL, accepted]))


def _sparse_q(rows: VerifyRows, r: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate ids [S, C] and their probabilities; a draft without stored q is a point mass."""
    ids, q = rows.candidate_ids[r], rows.candidate_probs[r]
    if ids is None or q is None:
        ids = torch.tensor(rows.drafts[r], dtype=torch.int64, device=device)[:, None]
        return ids, torch.ones(ids.shape, dtype=torch.float32, device=device)
    return ids.to(device), q.to(device)  # a drafter in another process sends host memory


def _at_draft(
    probs: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, drafts: Sequence[int]
) -> tuple[list[float], list[float]]:
    """p_i(d_i) and q_i(d_i) of each slot."""
    drafted = torch.tensor(drafts, dtype=torch.int64, device=probs.device)[:, None]
    p_draft = probs[: len(drafts)].gather(1, drafted)[:, 0]
    p, q_draft = torch.stack([p_draft, (q * (ids == drafted)).sum(-1)]).tolist()
    return p, q_draft


def _accept_standard(
    probs: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, drafts: Sequence[int], noise: Sequence[float]
) -> int:
    p_draft, q_draft = _at_draft(probs, q, ids, drafts)
    for slot in range(len(drafts)):
        if not noise[slot] * q_draft[slot] < p_draft[slot]:
            return slot
    return len(drafts)


def _accept_block(
    probs: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, drafts: Sequence[int], noise: Sequence[float]
) -> tuple[int, float]:
    """(accepted drafts, weight of p in the residual): every prefix is tested, the longest that passes stands."""
    p_draft, q_draft = _at_draft(probs, q, ids, drafts)
    count = len(drafts)
    weights = [1.0]
    for slot in range(count):
        ratio = p_draft[slot] / q_draft[slot] if q_draft[slot] > 0 else float(p_draft[slot] > 0) * float("inf")
        weights.append(min(1.0, weights[-1] * ratio) if weights[-1] > 0 else 0.0)
    p_candidates = probs[:count].gather(1, ids)
    outside = (1.0 - p_candidates.sum(-1)).clamp_min(0).tolist()
    accepted = 0
    for length in range(1, count + 1):
        weight = weights[length]
        if length == count:
            passes = weight
        else:
            inside = (weight * p_candidates[length] - q[length]).clamp_min(0).sum().item()
            surplus = weight * outside[length] + inside
            bottom = surplus + 1.0 - weight
            passes = surplus / bottom if bottom > 0 else 1.0
        if noise[length - 1] < passes:
            accepted = length
    return accepted, weights[accepted]


def draw(weights: torch.Tensor, uniform: float) -> int:
    """Inverse CDF: the first id whose cumulated weight exceeds uniform times the total; never one of weight zero.

    weights [V] ≥ 0, not necessarily normalised; summed in fp64. The host reads once.
    """
    cumulated = weights.double().cumsum(0)
    index = torch.searchsorted(cumulated, cumulated[-1:] * uniform, right=True)
    possible = weights.gather(0, index.clamp_max(weights.shape[0] - 1)) > 0
    found, is_possible = torch.cat([index, possible.to(index.dtype)]).tolist()
    if found >= weights.shape[0] or not is_possible:  # rounding at the upper end
        found = int(weights.nonzero()[-1])
    return int(found)
