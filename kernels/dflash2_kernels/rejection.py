"""Sparse-q rejection: which drafts stand and which token follows, for all requests of a step, without ever densifying q.

Standard rule (Leviathan et al. 2211.17192; Chen et al. 2302.01318): draft d of slot i stands iff u·q_i(d) < p_i(d); at the first
that falls, draw from max(p_i - q_i, 0); behind the last, draw from the next row's p. Draws are inverse CDFs in order of ids, with
the noise of (seed, position, purpose). Greedy requests (temperature < 1e-5) keep the longest prefix that equals the argmax (the lowest id
among equals) and take its next token. p is the target's row behind temperature, then top_k, top_p and min_p, ties to the lower id.

Everything is decided in whole numbers (`integer_softmax`): kernel and reference agree on every integer by construction.
Shapes: R requests, T rows of logits (request r owns first_row[r] … first_row[r + 1] - 1, one more than it has drafts), V vocabulary, S slots,
C candidates. Bytes: reads T·V logits once for the maxima, a second time for the masses of sampled rows (exact sums need the maximum
first), again for every pass of the search for top_k and top_p; writes 2·R integers. All passes but the first find a row in the L2
cache while the step's rows fit it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash2_kernels import noise
from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.integer_softmax import LARGEST_VOCAB, TOP_BITS, depth_below, rank, weight, weights_reference
from dflash2_kernels.noise import unit, words
from dflash2_kernels.published_shapes import BATCHES, CANDIDATES, DRAFT_BLOCK, VOCAB
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import ceil_div, jit, next_power_of_2, tl

OPERATOR = Operator("sparse_rejection")
GREEDY_BELOW = 1e-5
_TILE = 2048
_SEARCH_TILE = 1024
_WAYS = 4  # thresholds tried in one pass
MOST_PASSES = 27  # ⌈log 2⁶² / log 5⌉: each leaves a fifth of the ranks; it ends before once a single id is left between


@dataclass(frozen=True)
class RejectionRows:
    """What is to be verified; tensors on one device.

    first_row [R + 1] int32: the first row of each request, and T. drafts [R, S] int64: what lies behind a request's own count is not
    read. candidate_ids [R, S, C] int64, distinct in a slot, -1 where there is none; candidate_probs [R, S, C] fp32, the very row
    that the draft was drawn from (a draft that was not drawn: itself, with probability 1). temperature, top_p, min_p [R] fp32, top_k [R]
    int32 (0: off; top_p 1: off; min_p 0: off). seeds [R] int64 (above 2⁶³ as two's complement). positions [R] int64: of the token
    that the request's first row decides.
    """

    first_row: torch.Tensor
    drafts: torch.Tensor
    candidate_ids: torch.Tensor
    candidate_probs: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


# ---- reference ------------------------------------------------------------------------------------------------------


def sparse_rejection_reference(logits: torch.Tensor, rows: RejectionRows) -> tuple[torch.Tensor, torch.Tensor]:
    """logits fp32 [T, V] → (num_accepted [R] int32, next_token [R] int64)."""
    first = rows.first_row.tolist()
    decided = [_decide_reference(logits[first[r] : first[r + 1]], rows, r) for r in range(len(first) - 1)]
    accepted = torch.tensor([one for one, _ in decided], dtype=torch.int32, device=logits.device)
    return accepted, torch.tensor([token for _, token in decided], dtype=torch.int64, device=logits.device)


def _decide_reference(logits: torch.Tensor, rows: RejectionRows, r: int) -> tuple[int, int]:
    count = logits.shape[0] - 1
    drafts = rows.drafts[r, :count].tolist()
    if float(rows.temperature[r]) < GREEDY_BELOW:
        best = logits.argmax(-1).tolist()
        accepted = next((slot for slot, draft in enumerate(drafts) if draft != best[slot]), count)
        return accepted, best[accepted]
    positions = rows.positions[r] + torch.arange(count + 1, device=logits.device)
    random = noise.words_reference(rows.seeds[r].expand(count + 1), positions) >> 8
    for slot, draft in enumerate(drafts):
        kept = _kept_reference(logits[slot], rows, r)
        total = float(kept.sum())
        ids, q = rows.candidate_ids[r, slot], rows.candidate_probs[r, slot].double()
        uniform = int(random[noise.ACCEPT, slot]) * 2.0**-24
        if not uniform * float(q[ids == draft].sum()) * total < float(kept[draft]):
            ids, q = ids[ids >= 0], q[ids >= 0]
            residual = kept.clone()
            residual[ids] -= torch.minimum(kept[ids], (q * total).to(torch.int64))
            return slot, _draw_reference(
                residual if int(residual.sum()) > 0 else kept, int(random[noise.RESIDUAL, slot])
            )
    return count, _draw_reference(_kept_reference(logits[count], rows, r), int(random[noise.BONUS, count]))


def _kept_reference(logits: torch.Tensor, rows: RejectionRows, r: int) -> torch.Tensor:
    """Weights of one row, zero where top_k, top_p or min_p leave nothing: int64 [V]."""
    weights, ranks = weights_reference(logits, rows.temperature[r])
    k, p = int(rows.top_k[r]), float(rows.top_p[r])
    if k > 0 or p < 1.0:
        order = ranks.argsort(descending=True)
        order = order[:k] if k > 0 else order
        if p < 1.0:
            ordered = weights[order]
            needed = (ordered.sum().double() * p).ceil().to(torch.int64).clamp_min(1)
            order = order[ordered.cumsum(0) - ordered < needed]
        weights = torch.zeros_like(weights).index_copy(0, order, weights[order])
    return weights.masked_fill(weights.double() < float(rows.min_p[r]) * 2.0**TOP_BITS, 0)


def _draw_reference(weights: torch.Tensor, random: int) -> int:
    """The first id whose cumulated weight exceeds random · 2⁻²⁴ of the total."""
    cumulated = weights.cumsum(0)
    goal = random * int(cumulated[-1]) >> 24
    return int(torch.searchsorted(cumulated, torch.tensor([goal], device=weights.device), right=True))


# ---- kernels --------------------------------------------------------------------------------------------------------


@jit
def _tile_maxima_kernel(logits_ptr, values_ptr, ids_ptr, num_ids, row_stride, TILE: tl.constexpr):
    """The largest logit of a tile of a row, and its lowest id."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    value = tl.load(logits_ptr + row * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
    best = tl.max(value, 0)
    at = row * tl.num_programs(1) + tile
    tl.store(values_ptr + at, best)
    tl.store(ids_ptr + at, tl.min(tl.where((value == best) & (ids < num_ids), ids, 0x7FFFFFFF), 0))


@jit
def _search(
    row_ptr, num_ids, top, temperature, low, needed, BY_MASS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr
):
    """The largest rank t ≥ low such that as many ids as needed (BY_MASS: as much weight) have a rank of at least t."""
    high = tl.full([], 0x4000000000000000, tl.int64)
    above_low, above_high = tl.full([], 0x7FFFFFFF, tl.int32), tl.full([], 0, tl.int32)
    way = tl.arange(0, WAYS)
    while (high - low > 1) & (above_low - above_high > 1):
        step = (high - low + WAYS) // (WAYS + 1)
        thresholds = low + step * (1 + way)
        numbers = tl.zeros([TILE, WAYS], dtype=tl.int32)
        masses = tl.zeros([TILE, WAYS], dtype=tl.int64)
        for first in range(0, num_ids, TILE):
            ids = first + tl.arange(0, TILE)
            below = depth_below(tl.load(row_ptr + ids, mask=ids < num_ids, other=float("-inf")), top, temperature)
            reached = (rank(below, ids)[:, None] >= thresholds[None, :]) & (ids < num_ids)[:, None]
            numbers += reached.to(tl.int32)
            if BY_MASS:
                masses += tl.where(reached, weight(below)[:, None], 0)
        number = tl.sum(numbers, 0)
        if BY_MASS:
            passes = tl.sum(masses, 0) >= needed
        else:
            passes = number >= needed
        passing = tl.sum(passes.to(tl.int32), 0)
        above_low = tl.where(passing > 0, tl.sum(tl.where(way == passing - 1, number, 0), 0), above_low)
        above_high = tl.where(passing < WAYS, tl.sum(tl.where(way == passing, number, 0), 0), above_high)
        high = tl.minimum(high, low + step * (passing + 1))
        low += step * passing
    return low


@jit
def _row_limits_kernel(
    logits_ptr, values_ptr, ids_ptr, request_ptr, temperature_ptr, top_k_ptr, top_p_ptr, top_ptr, best_ptr, threshold_ptr,
    num_ids, row_stride, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """One row: its largest logit, the lowest id that has it, and the least rank that top_k and top_p keep."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    values = tl.load(values_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
    top = tl.max(values, 0)
    tl.store(top_ptr + row, top)
    tl.store(best_ptr + row, tl.min(tl.where(values == top, ids, 0x7FFFFFFF), 0).to(tl.int64))
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + request)
    threshold = tl.full([], 0, tl.int64)
    if temperature >= 1e-5:
        row_ptr = logits_ptr + row * row_stride
        top_k, top_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request)
        if (top_k > 0) & (top_k < num_ids):
            threshold = _search(row_ptr, num_ids, top, temperature, threshold, top_k, False, TILE, WAYS)
        if top_p < 1.0:
            masses = tl.zeros([TILE], dtype=tl.int64)
            for first in range(0, num_ids, TILE):
                own = first + tl.arange(0, TILE)
                below = depth_below(tl.load(row_ptr + own, mask=own < num_ids, other=float("-inf")), top, temperature)
                masses += tl.where(rank(below, own) >= threshold, weight(below), 0)
            needed = tl.ceil(tl.sum(masses, 0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            threshold = _search(row_ptr, num_ids, top, temperature, threshold, tl.maximum(needed, 1), True, TILE, WAYS)
    tl.store(threshold_ptr + row, threshold)


@jit
def _kept_weight(logit, ids, top, temperature, threshold, min_p):
    """Weight of ids behind temperature, top_k, top_p and min_p, int64."""
    below = depth_below(logit, top, temperature)
    own = weight(below)
    stays = (rank(below, ids) >= threshold) & (own.to(tl.float64) >= min_p.to(tl.float64) * 17592186044416.0)
    return tl.where(stays, own, 0)


@jit
def _tile_masses_kernel(
    logits_ptr, request_ptr, temperature_ptr, min_p_ptr, top_ptr, threshold_ptr, masses_ptr, num_ids, row_stride, TILE: tl.constexpr,
):  # fmt: skip
    """The kept weight of a tile of a row; nothing for greedy rows."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + request)
    if temperature >= 1e-5:
        ids = tile * TILE + tl.arange(0, TILE)
        logit = tl.load(logits_ptr + row * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
        kept = _kept_weight(
            logit, ids, tl.load(top_ptr + row), temperature, tl.load(threshold_ptr + row), tl.load(min_p_ptr + request)
        )
        tl.store(masses_ptr + row * tl.num_programs(1) + tile, tl.sum(kept, 0))


@jit
def _taken(q, total, kept):
    """What q takes from a candidate's weight, int64."""
    return tl.minimum(kept, (q.to(tl.float64) * total.to(tl.float64)).to(tl.int64))


@jit
def _decide_kernel(
    logits_ptr, first_row_ptr, drafts_ptr, candidate_ids_ptr, candidate_probs_ptr, temperature_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    top_ptr, best_ptr, threshold_ptr, masses_ptr, accepted_ptr, token_ptr,
    num_ids, row_stride, num_tiles, num_slots, num_candidates,
    TILES: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One request: walk its slots to the first draft that falls, then draw the token behind."""
    r = tl.program_id(0).to(tl.int64)
    start = tl.load(first_row_ptr + r).to(tl.int64)
    count = (tl.load(first_row_ptr + r + 1) - start - 1).to(tl.int32)
    temperature, min_p = tl.load(temperature_ptr + r), tl.load(min_p_ptr + r)
    accepted = tl.full([], 0, tl.int32)
    going = count > 0
    if temperature < 1e-5:
        while going:
            going = tl.load(drafts_ptr + r * num_slots + accepted) == tl.load(best_ptr + start + accepted)
            accepted += going.to(tl.int32)
            going = going & (accepted < count)
        tl.store(accepted_ptr + r, accepted)
        tl.store(token_ptr + r, tl.load(best_ptr + start + accepted))
    else:
        seed, position = tl.load(seeds_ptr + r), tl.load(positions_ptr + r)
        tile, candidate = tl.arange(0, TILES), tl.arange(0, CANDIDATES)
        while going:
            row = start + accepted
            total = tl.sum(tl.load(masses_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0), 0)
            draft = tl.load(drafts_ptr + r * num_slots + accepted)
            logit = tl.load(logits_ptr + row * row_stride + draft)
            own = _kept_weight(
                logit, draft.to(tl.int32), tl.load(top_ptr + row), temperature, tl.load(threshold_ptr + row), min_p
            )
            at = (r * num_slots + accepted) * num_candidates + candidate
            ids = tl.load(candidate_ids_ptr + at, mask=candidate < num_candidates, other=-1)
            q = tl.load(candidate_probs_ptr + at, mask=candidate < num_candidates, other=0.0)
            at_draft = tl.sum(tl.where(ids == draft, q, 0.0), 0).to(tl.float64)
            _w0, w1, _w2, _w3 = words(seed, position + accepted, 0)
            going = unit(w1).to(tl.float64) * at_draft * total.to(tl.float64) < own.to(tl.float64)
            accepted += going.to(tl.int32)
            going = going & (accepted < count)
        row = start + accepted
        row_ptr = logits_ptr + row * row_stride
        top, threshold = tl.load(top_ptr + row), tl.load(threshold_ptr + row)
        masses = tl.load(masses_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0)
        total = tl.sum(masses, 0)
        at = (r * num_slots + accepted) * num_candidates + candidate
        present = candidate < tl.where(accepted < count, num_candidates, 0)
        ids = tl.load(candidate_ids_ptr + at, mask=present, other=-1)
        q = tl.load(candidate_probs_ptr + at, mask=present, other=0.0)
        logit = tl.load(row_ptr + ids, mask=ids >= 0, other=float("-inf"))
        taken = _taken(q, total, _kept_weight(logit, ids.to(tl.int32), top, temperature, threshold, min_p))
        taken = tl.where(ids >= 0, taken, 0)
        taken = tl.where(tl.sum(taken, 0) < total, taken, 0)  # only rounding can leave nothing
        left = total - tl.sum(taken, 0)
        for place in range(num_candidates):
            mine = candidate == place
            masses -= tl.where(
                tile == tl.sum(tl.where(mine, ids, 0), 0) // TILE, tl.sum(tl.where(mine, taken, 0), 0), 0
            )
        _w0, _w1, w2, w3 = words(seed, position + accepted, 0)
        random = (tl.where(accepted < count, w2, w3) >> 8).to(tl.int64)
        goal = random * (left >> 24) + ((random * (left & 0xFFFFFF)) >> 24)
        chosen = tl.sum((tl.cumsum(masses, 0) <= goal).to(tl.int32), 0)
        goal -= tl.sum(tl.where(tile < chosen, masses, 0), 0)
        own = chosen * TILE + tl.arange(0, TILE)
        logit = tl.load(row_ptr + own, mask=own < num_ids, other=float("-inf"))
        kept = _kept_weight(logit, own, top, temperature, threshold, min_p)
        for place in range(num_candidates):
            mine = candidate == place
            kept -= tl.where(own == tl.sum(tl.where(mine, ids, 0), 0), tl.sum(tl.where(mine, taken, 0), 0), 0)
        token = chosen * TILE + tl.sum((tl.cumsum(kept, 0) <= goal).to(tl.int32), 0)
        tl.store(accepted_ptr + r, accepted)
        tl.store(token_ptr + r, token.to(tl.int64))


def sparse_rejection(logits: torch.Tensor, rows: RejectionRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator: logits fp32 [T, V] → (num_accepted [R] int32, next_token [R] int64). Raises ValueError on what does not fit."""
    _check(logits, rows)
    num_requests, num_slots, num_candidates = rows.candidate_ids.shape
    if num_requests == 0 or not OPERATOR.uses_kernel(logits, *vars(rows).values()):
        return sparse_rejection_reference(logits, rows)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, num_ids = logits.shape
    tiles, stride, device = ceil_div(num_ids, _TILE), logits.stride(0), logits.device
    counts = rows.first_row.diff()
    request = torch.repeat_interleave(
        torch.arange(num_requests, device=device, dtype=torch.int32), counts, output_size=num_rows
    )
    values = torch.empty(num_rows, tiles, device=device)
    ids = torch.empty(num_rows, tiles, dtype=torch.int32, device=device)
    top = torch.empty(num_rows, device=device)
    best, threshold = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    masses = torch.empty(num_rows, tiles, dtype=torch.int64, device=device)
    accepted = torch.empty(num_requests, dtype=torch.int32, device=device)
    token = torch.empty(num_requests, dtype=torch.int64, device=device)
    tiles_held = next_power_of_2(tiles)
    _tile_maxima_kernel[(num_rows, tiles)](logits, values, ids, num_ids, stride, TILE=_TILE, num_warps=4)
    _row_limits_kernel[(num_rows,)](
        logits, values, ids, request, rows.temperature, rows.top_k, rows.top_p, top, best, threshold,
        num_ids, stride, tiles, TILES=tiles_held, TILE=_SEARCH_TILE, WAYS=_WAYS, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _tile_masses_kernel[(num_rows, tiles)](
        logits, request, rows.temperature, rows.min_p, top, threshold, masses, num_ids, stride, TILE=_TILE,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _decide_kernel[(num_requests,)](
        logits, rows.first_row, rows.drafts, rows.candidate_ids, rows.candidate_probs, rows.temperature, rows.min_p, rows.seeds,
        rows.positions, top, best, threshold, masses, accepted, token, num_ids, stride, tiles, num_slots, num_candidates,
        TILES=tiles_held, TILE=_TILE, CANDIDATES=next_power_of_2(num_candidates), num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return accepted, token


_KINDS = {
    "first_row": torch.int32, "drafts": torch.int64, "candidate_ids": torch.int64, "candidate_probs": torch.float32,
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32,
    "seeds": torch.int64, "positions": torch.int64,
}  # fmt: skip


def _check(logits: torch.Tensor, rows: RejectionRows) -> None:
    """Shapes and types; values (rows that first_row names, ids inside the vocabulary) are the caller's."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not 0 < logits.shape[1] <= LARGEST_VOCAB:
        raise ValueError(
            f"sparse_rejection: expected logits fp32 [T, V], V ≤ {LARGEST_VOCAB}; got {logits.dtype} {tuple(logits.shape)}"
        )
    if rows.candidate_ids.dim() != 3 or rows.candidate_ids.shape[2] == 0:
        raise ValueError(
            f"sparse_rejection: expected candidate_ids [R, S, C > 0], got {tuple(rows.candidate_ids.shape)}"
        )
    num_requests, num_slots, _ = rows.candidate_ids.shape
    shapes = {
        "first_row": (num_requests + 1,),
        "drafts": (num_requests, num_slots),
        "candidate_probs": tuple(rows.candidate_ids.shape),
    }
    for name, kind in _KINDS.items():
        one, shape = getattr(rows, name), shapes.get(name, (num_requests,))
        if name == "candidate_ids":
            shape = tuple(one.shape)
        if tuple(one.shape) != shape or one.dtype != kind or not one.is_contiguous():
            raise ValueError(
                f"sparse_rejection: expected {name} {kind} {shape}, contiguous; got {one.dtype} {tuple(one.shape)}"
            )


# ---- models ---------------------------------------------------------------------------------------------------------


def sparse_rejection_traffic(
    num_requests: int, width: int, num_ids: int, candidates: int, num_passes: int = 0
) -> Traffic:
    """Model of one call on sampled requests of `width` rows each, all drafts accepted; num_passes: of the search in every row."""
    num_rows, tiles = num_requests * width, ceil_div(num_ids, _TILE)
    logits, q = num_rows * num_ids * 4, num_requests * (width - 1) * candidates * 12
    per_row = tiles * (8 + 12) + tiles * 8 + 4 * (4 + 8 + 8)  # maxima, masses and limits, as they are read again
    read = logits * (2 + num_passes) + q + num_rows * per_row + num_requests * (_TILE * 4 + tiles * 8)
    written = num_rows * (tiles * (4 + 4 + 8) + 20) + num_requests * 12
    return Traffic(read, written, logits + q + num_requests * 12, num_rows * num_ids * 20 * (1 + num_passes))


def traffic_cases() -> Iterator[TrafficCase]:
    """Verification of the published drafter's blocks: plain sampling, and top_p with as many passes as a search can need."""
    twice = "exact sums need a row's maximum first, so sampled rows are read twice; the second time from L2 while the step's rows fit it"
    for batch in BATCHES:
        traffic = sparse_rejection_traffic(batch, DRAFT_BLOCK, VOCAB, CANDIDATES)
        yield TrafficCase(OPERATOR.name, f"{batch}×{DRAFT_BLOCK}×{VOCAB}", traffic, twice)
    traffic = sparse_rejection_traffic(8, DRAFT_BLOCK, VOCAB, CANDIDATES, 1 + MOST_PASSES)
    search = f"top_p reads a row once for its mass and at most {MOST_PASSES} times to find its threshold, from L2 while the rows fit it"
    yield TrafficCase(OPERATOR.name, f"8×{DRAFT_BLOCK}×{VOCAB}, top_p, longest search", traffic, search)


def compile_cases() -> Iterator[CompileCase]:
    """All four kernels for the published vocabulary, with 16 candidates (DFlash 2) and 128 (DFlash 1)."""
    tiles = next_power_of_2(ceil_div(VOCAB, _TILE))
    sizes = {"num_ids": "i32", "row_stride": "i32"}
    divisible = ("num_ids", "row_stride")
    yield CompileCase(
        "sparse_rejection maxima", _tile_maxima_kernel,
        {"logits_ptr": "*fp32", "values_ptr": "*fp32", "ids_ptr": "*i32", **sizes}, {"TILE": _TILE}, divisible=divisible,
    )  # fmt: skip
    options = {"request_ptr": "*i32", "temperature_ptr": "*fp32"}
    yield CompileCase(
        "sparse_rejection limits", _row_limits_kernel,
        {
            "logits_ptr": "*fp32", "values_ptr": "*fp32", "ids_ptr": "*i32", **options, "top_k_ptr": "*i32", "top_p_ptr": "*fp32",
            "top_ptr": "*fp32", "best_ptr": "*i64", "threshold_ptr": "*i64", **sizes, "num_tiles": "i32",
        },
        {"TILES": tiles, "TILE": _SEARCH_TILE, "WAYS": _WAYS}, num_warps=8, divisible=divisible,
    )  # fmt: skip
    limits = {"min_p_ptr": "*fp32", "top_ptr": "*fp32", "threshold_ptr": "*i64", "masses_ptr": "*i64"}
    yield CompileCase(
        "sparse_rejection masses", _tile_masses_kernel, {"logits_ptr": "*fp32", **options, **limits, **sizes}, {"TILE": _TILE},
        divisible=divisible,
    )  # fmt: skip
    for candidates in (CANDIDATES, 128):
        yield CompileCase(
            f"sparse_rejection decide {candidates}", _decide_kernel,
            {
                "logits_ptr": "*fp32", "first_row_ptr": "*i32", "drafts_ptr": "*i64", "candidate_ids_ptr": "*i64",
                "candidate_probs_ptr": "*fp32", "temperature_ptr": "*fp32", **limits, "seeds_ptr": "*i64", "positions_ptr": "*i64",
                "best_ptr": "*i64", "accepted_ptr": "*i32", "token_ptr": "*i64", **sizes,
                "num_tiles": "i32", "num_slots": "i32", "num_candidates": "i32",
            },
            {"TILES": tiles, "TILE": _TILE, "CANDIDATES": candidates}, num_warps=2, divisible=divisible,
        )  # fmt: skip
