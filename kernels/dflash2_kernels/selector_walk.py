"""The candidate selector's walk (DFlash 2): one candidate per slot, each scored given the one chosen before.

    score_t(p → c) = unary[t, c] + Σ_r A[p, r] · w[t, r] · B[c, r]          q_t = softmax_c(score_t(d_{t-1} → c) / temperature)
    d_t:  GREEDY  argmax of the scores      DRAW  inverse CDF of q_t at u(seed, position)      RACE  argmax q_t / E(seed, position, id)

The lower candidate wins a tie. The draft of slot t = 0 … S-1 has position base + 1 + t; its noise is a function of that, the seed and (in
a race) the token id, nothing else (`noise`). Without codebooks (DFlash 1) a score is the unary one.

Two forms of the same walk. The reference holds every (predecessor candidate → candidate) score of a block as a lattice, finds the choice
of every possible path in a few batched operations and follows indices; the kernel is one program per request that scores the realised
rows only, C times fewer, and keeps everything between two slots in registers.

Shapes: R requests (n blocks), S slots, C candidates, r rank, V vocabulary. Row 0's predecessor is the anchor, the same for all C rows.
Bytes: reads R·S·(r·(C + 2) values + 12·C) and 32·R, writes R·S·(4·C + 8).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.noise import DRAFT, exponential, exponentials_reference, token_key, uniforms_reference, unit, words
from dflash2_kernels.published_shapes import BATCHES, CANDIDATES, DRAFT_BLOCK, SELECTOR_RANK
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import jit, next_power_of_2, tl

OPERATOR = Operator("selector_walk")
PADDING, GREEDY, DRAW, RACE = -1, 0, 1, 2  # rules


# ---- reference ------------------------------------------------------------------------------------------------------


def selector_lattice_reference(
    unary: torch.Tensor, predecessors: torch.Tensor, hidden: torch.Tensor, successors: torch.Tensor
) -> torch.Tensor:
    """unary [n, S, C] fp32, predecessors [n, S, C, r] (codebook A rows of the slot before), hidden [n, S, r], successors
    [n, S, C, r] (codebook B rows) → scores [n, S, C (predecessor), C (candidate)] fp32."""
    gated = predecessors.float() * hidden.float()[:, :, None]
    return torch.matmul(gated, successors.float().transpose(-1, -2)) + unary[:, :, None]


def follow(choices: torch.Tensor) -> torch.Tensor:
    """Indices [n, S] along the path of each of n blocks: choices[b, t, p] is the candidate chosen at slot t behind predecessor p."""
    table = choices.cpu().numpy()
    path = np.zeros(table.shape[:2], dtype=np.int64)
    blocks, previous = np.arange(len(table)), np.zeros(len(table), dtype=np.int64)
    for slot in range(table.shape[1]):
        path[:, slot] = previous = table[blocks, slot, previous]
    return torch.from_numpy(path).to(choices.device)


def follow_best(scores: torch.Tensor) -> torch.Tensor:
    """`follow(scores.argmax(-1))` for scores [n, S, C, C] in host memory, looking at the rows of the path only."""
    table = scores.numpy()
    path = np.zeros(table.shape[:2], dtype=np.int64)
    blocks, previous = np.arange(len(table)), np.zeros(len(table), dtype=np.int64)
    for slot in range(table.shape[1]):
        path[:, slot] = previous = table[blocks, slot, previous].argmax(-1)
    return torch.from_numpy(path)


def inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index whose cumulated probability exceeds uniform × total: probs [..., C], uniforms [...] → int64 [...].

    Never an index of probability zero.
    """
    cumulated = probs.double().cumsum(-1)
    limit = uniforms.double() * cumulated[..., -1]
    index = (cumulated <= limit[..., None]).sum(-1)
    return torch.where(index < probs.shape[-1], index, probs.argmax(-1))


def selector_lattice(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Arguments as `selector_walk` → scores [R, S, C (predecessor), C] fp32."""
    first = anchors[:, None, None].expand(-1, 1, candidate_ids.shape[2])
    predecessors = torch.cat([first, candidate_ids[:, :-1]], dim=1)
    return selector_lattice_reference(
        unary,
        torch.nn.functional.embedding(predecessors, predecessor_codebook),
        hidden,
        torch.nn.functional.embedding(candidate_ids, successor_codebook),
    )


def walk_lattice(
    scores: torch.Tensor,
    temperatures: torch.Tensor,
    rules: Sequence[int],
    uniforms: torch.Tensor | None,
    exponentials: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The walk through scores [R, S, C or 1 (predecessor), C] → (chosen candidates [R, S] int64, q of every row of the lattice, or None if
    every request is greedy).

    temperatures [R] fp32 > 0; uniforms [R, S] for requests that DRAW; exponentials [M, S, C] fp64 for the M that RACE, in order.
    """
    if scores.shape[2] > 1 and scores.device.type == "cpu" and all(rule == GREEDY for rule in rules):
        return follow_best(scores), None
    choices = scores.argmax(-1)
    probs = None
    if any(rule in (DRAW, RACE) for rule in rules):
        probs = torch.softmax(scores / temperatures[:, None, None, None], dim=-1)
        racing = [r for r, rule in enumerate(rules) if rule == RACE]
        if racing:
            assert exponentials is not None, "requests that race need noise of their candidates"
            own = torch.tensor(racing, device=scores.device)
            choices[own] = (probs[own].double() / exponentials[:, :, None]).argmax(-1)
        if DRAW in rules:
            assert uniforms is not None, "requests that draw need noise"
            drawn = inverse_cdf(probs, uniforms[:, :, None].expand(probs.shape[:-1]))
            draws = torch.tensor([rule == DRAW for rule in rules], device=scores.device)
            choices = torch.where(draws[:, None, None], drawn, choices)
    if scores.shape[2] == 1:  # every slot for itself, whatever came before
        return choices[:, :, 0], probs
    return follow(choices), probs


def realised_rows(lattice: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """The rows [R, S, C] of lattice [R, S, C or 1, C] that a path [R, S] goes through."""
    if lattice.shape[2] == 1:
        return lattice[:, :, 0]
    before = torch.cat([torch.zeros_like(path[:, :1]), path[:, :-1]], dim=1)
    return lattice.gather(2, before[:, :, None, None].expand(-1, -1, 1, lattice.shape[-1]))[:, :, 0]


def selector_walk_reference(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    predecessor_codebook: torch.Tensor | None,
    successor_codebook: torch.Tensor | None,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    rules: torch.Tensor,
    seeds: torch.Tensor,
    bases: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as `selector_walk`."""
    num_requests, num_slots, _ = unary.shape
    token_ids = torch.zeros(num_requests, num_slots, dtype=torch.int64, device=unary.device)
    probs = torch.zeros(unary.shape, dtype=torch.float32, device=unary.device)
    real = [r for r, rule in enumerate(rules.tolist()) if rule != PADDING]
    if not real or num_slots == 0:
        return token_ids, probs
    own = torch.tensor(real, device=unary.device)
    unary, candidate_ids, temperatures, seeds, bases = (
        one[own] for one in (unary, candidate_ids, temperatures, seeds, bases)
    )
    kinds = rules[own].tolist()
    if predecessor_codebook is None or successor_codebook is None or hidden is None:
        scores = unary[:, :, None]
    else:
        scores = selector_lattice(
            unary, candidate_ids, hidden[own], predecessor_codebook, successor_codebook, anchors[own]
        )
    positions = bases[:, None] + 1 + torch.arange(num_slots, device=unary.device)
    uniforms = uniforms_reference(seeds[:, None].expand(positions.shape), positions, DRAFT)
    racing = torch.tensor([r for r, kind in enumerate(kinds) if kind == RACE], dtype=torch.int64, device=unary.device)
    keys = (seeds[racing, None].expand(-1, num_slots).reshape(-1), positions[racing].reshape(-1))
    exponentials = exponentials_reference(*keys, candidate_ids[racing].flatten(0, 1)).view(candidate_ids[racing].shape)
    warm = torch.where(rules[own] == GREEDY, torch.ones_like(temperatures), temperatures)
    path, lattice = walk_lattice(scores, warm, kinds, uniforms, exponentials)
    token_ids[own] = candidate_ids.gather(-1, path[:, :, None])[:, :, 0]
    rows = torch.nn.functional.one_hot(path, unary.shape[2]).float()
    if lattice is not None:
        rows = torch.where((rules[own] == GREEDY)[:, None, None], rows, realised_rows(lattice, path))
    probs[own] = rows
    return token_ids, probs


# ---- kernel ---------------------------------------------------------------------------------------------------------


@jit
def _first_best(value, place, SIZE: tl.constexpr):
    """The lowest place of the largest value."""
    return tl.min(tl.where(value == tl.max(value, 0), place, SIZE), 0)


@jit
def _walk_kernel(
    unary_ptr, ids_ptr, hidden_ptr, predecessors_ptr, successors_ptr, anchors_ptr, temperatures_ptr, rules_ptr, seeds_ptr, bases_ptr,
    tokens_ptr, probs_ptr,
    num_slots, num_candidates, rank,
    unary_request_stride, unary_slot_stride, ids_request_stride, ids_slot_stride, hidden_request_stride, hidden_slot_stride,
    predecessors_stride, successors_stride,
    HAS_SELECTOR: tl.constexpr, CANDIDATES: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program walks one request's slots."""
    request = tl.program_id(0).to(tl.int64)
    rule = tl.load(rules_ptr + request)
    if rule < 0:
        return
    seed, base = tl.load(seeds_ptr + request), tl.load(bases_ptr + request)
    temperature = tl.load(temperatures_ptr + request)
    place = tl.arange(0, CANDIDATES)
    inside = place < num_candidates
    column = tl.arange(0, RANK)
    held = column < rank
    previous = tl.load(anchors_ptr + request)
    for slot in range(num_slots):
        ids = tl.load(ids_ptr + request * ids_request_stride + slot * ids_slot_stride + place, mask=inside, other=0)
        score = tl.load(
            unary_ptr + request * unary_request_stride + slot * unary_slot_stride + place,
            mask=inside,
            other=float("-inf"),
        )
        if HAS_SELECTOR:
            w = tl.load(
                hidden_ptr + request * hidden_request_stride + slot * hidden_slot_stride + column, mask=held, other=0.0
            )
            a = tl.load(predecessors_ptr + previous * predecessors_stride + column, mask=held, other=0.0)
            gated = a.to(tl.float32) * w.to(tl.float32)
            successors_at = successors_ptr + ids[:, None] * successors_stride + column[None, :]
            b = tl.load(successors_at, mask=inside[:, None] & held[None, :], other=0.0).to(tl.float32)
            score += tl.sum(gated[None, :] * b, axis=1)
        choice = _first_best(score, place, CANDIDATES)
        q = (place == choice).to(tl.float32)
        if rule > 0:
            warm = score / temperature
            weight = tl.exp(warm - tl.max(warm, 0))
            q = weight / tl.sum(weight, 0)
            position = base + 1 + slot
            if rule == 1:
                u = unit(words(seed, position, 0)[0])
                cumulated = tl.cumsum(q.to(tl.float64), 0)
                total = tl.sum(tl.where(place == num_candidates - 1, cumulated, 0.0), 0)
                passed = tl.sum((inside & (cumulated <= u.to(tl.float64) * total)).to(tl.int32), 0)
                choice = tl.where(passed < num_candidates, passed, _first_best(q, place, CANDIDATES))
            else:
                key, salt = token_key(seed, position)
                ratio = tl.where(inside, q.to(tl.float64) / exponential(key, salt, ids), -1.0)
                choice = _first_best(ratio, place, CANDIDATES)
        previous = tl.sum(tl.where(place == choice, ids, 0), 0)
        tl.store(tokens_ptr + request * num_slots + slot, previous)
        tl.store(probs_ptr + (request * num_slots + slot) * num_candidates + place, q, mask=inside)


def selector_walk(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    predecessor_codebook: torch.Tensor | None,
    successor_codebook: torch.Tensor | None,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    rules: torch.Tensor,
    seeds: torch.Tensor,
    bases: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator: unary [R, S, C] fp32, candidate_ids [R, S, C] int64 (distinct in a slot), hidden [R, S, r] (projected), codebooks
    [V, r] (all three None: no selector), anchors [R] int64, temperatures [R] fp32, rules [R] int32, seeds and bases (the anchor's
    position) [R] int64 → (token ids [R, S] int64, realised q rows [R, S, C] fp32: one-hot for greedy requests).

    PADDING requests (a rule below 0) are not read, and their rows are zeros. Ids may differ between kernel and reference only where a
    decision lies within the rounding of the scores (2⁻²² of their size). Raises ValueError on operands that do not fit.
    """
    _check(
        unary,
        candidate_ids,
        hidden,
        predecessor_codebook,
        successor_codebook,
        anchors,
        temperatures,
        rules,
        seeds,
        bases,
    )
    own = [one for one in (hidden, predecessor_codebook, successor_codebook) if one is not None]
    tensors = (unary, candidate_ids, anchors, temperatures, rules, seeds, bases, *own)
    num_requests, num_slots, num_candidates = unary.shape
    if not OPERATOR.uses_kernel(*tensors):
        return selector_walk_reference(
            unary,
            candidate_ids,
            hidden,
            predecessor_codebook,
            successor_codebook,
            anchors,
            temperatures,
            rules,
            seeds,
            bases,
        )
    token_ids = torch.zeros(num_requests, num_slots, dtype=torch.int64, device=unary.device)
    probs = torch.zeros(unary.shape, dtype=torch.float32, device=unary.device)
    if probs.numel() == 0:
        return token_ids, probs
    with_selector = hidden is not None
    projected = hidden if hidden is not None else unary
    tables = own[1:] if with_selector else (unary, unary)
    rank = projected.shape[2] if with_selector else 1
    _walk_kernel[(num_requests,)](
        unary, candidate_ids, projected, *tables, anchors, temperatures, rules, seeds, bases, token_ids, probs,
        num_slots, num_candidates, rank,
        *unary.stride()[:2], *candidate_ids.stride()[:2], *projected.stride()[:2], *(one.stride(0) for one in tables),
        HAS_SELECTOR=with_selector, CANDIDATES=next_power_of_2(num_candidates), RANK=next_power_of_2(rank),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids, probs


def _check(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    predecessor_codebook: torch.Tensor | None,
    successor_codebook: torch.Tensor | None,
    *by_request: torch.Tensor,
) -> None:
    if (
        unary.dim() != 3
        or unary.dtype != torch.float32
        or candidate_ids.shape != unary.shape
        or candidate_ids.dtype != torch.int64
    ):
        raise ValueError(
            f"selector_walk: expected unary [R, S, C] float32 and candidate_ids of its shape, int64; got {tuple(unary.shape)} {unary.dtype}, "
            f"{tuple(candidate_ids.shape)} {candidate_ids.dtype}"
        )
    kinds = (torch.int64, torch.float32, torch.int32, torch.int64, torch.int64)
    if any(one.shape != unary.shape[:1] or one.dtype != kind for one, kind in zip(by_request, kinds, strict=True)):
        raise ValueError(
            f"selector_walk: expected anchors, temperatures, rules, seeds, bases [{unary.shape[0]}] of {kinds}; got "
            f"{[(tuple(one.shape), one.dtype) for one in by_request]}"
        )
    parts = (hidden, predecessor_codebook, successor_codebook)
    given = [one for one in parts if one is not None]
    if given and (
        len(given) < 3
        or given[0].shape[:2] != unary.shape[:2]
        or given[1].shape != given[2].shape
        or given[1].shape[1:] != given[0].shape[2:]
    ):
        raise ValueError(
            f"selector_walk: expected hidden [R, S, r] and two codebooks [V, r], or none of them; got "
            f"{[None if one is None else tuple(one.shape) for one in parts]}"
        )
    if any(one.stride(-1) != 1 for one in (unary, candidate_ids, *given)):
        raise ValueError("selector_walk: expected contiguous last dimensions")


def selector_walk_traffic(num_requests: int, num_slots: int, num_candidates: int, rank: int, itemsize: int) -> Traffic:
    """Model of one call, every request drawing: everything is read once. FLOPs of the scores only."""
    slots = num_requests * num_slots
    read = slots * (rank * (num_candidates + 2) * itemsize + 12 * num_candidates) + num_requests * 32
    written = slots * (4 * num_candidates + 8)
    return Traffic(read, written, read + written, slots * rank * (2 * num_candidates + 1))


def traffic_cases() -> Iterator[TrafficCase]:
    """A draft step of the published drafter."""
    for batch in BATCHES:
        traffic = selector_walk_traffic(batch, DRAFT_BLOCK - 1, CANDIDATES, SELECTOR_RANK, 2)
        yield TrafficCase(
            OPERATOR.name,
            f"{batch} requests, {DRAFT_BLOCK - 1} slots, {CANDIDATES} candidates, rank {SELECTOR_RANK}, bf16",
            traffic,
        )


def compile_cases() -> Iterator[CompileCase]:
    """The published drafter's selector, and a drafter without one."""
    strides = (
        "unary_request_stride", "unary_slot_stride", "ids_request_stride", "ids_slot_stride", "hidden_request_stride", "hidden_slot_stride",
        "predecessors_stride", "successors_stride",
    )  # fmt: skip
    longs = dict.fromkeys(("ids_ptr", "anchors_ptr", "seeds_ptr", "bases_ptr", "tokens_ptr"), "*i64")
    floats = dict.fromkeys(("unary_ptr", "temperatures_ptr", "probs_ptr"), "*fp32")
    sizes = dict.fromkeys(("num_slots", "num_candidates", "rank", *strides), "i32")
    for name, kind, candidates, rank in (
        ("bf16", "bf16", CANDIDATES, SELECTOR_RANK),
        ("fp32", "fp32", CANDIDATES, SELECTOR_RANK),
        ("without selector", "fp32", 128, 1),
    ):
        yield CompileCase(
            f"selector_walk {name}", _walk_kernel,
            {
                **longs, **floats, "rules_ptr": "*i32", **sizes,
                **dict.fromkeys(("hidden_ptr", "predecessors_ptr", "successors_ptr"), f"*{kind}"),
            },
            {"HAS_SELECTOR": rank > 1, "CANDIDATES": candidates, "RANK": rank}, divisible=("num_candidates", "rank", *strides),
        )  # fmt: skip
