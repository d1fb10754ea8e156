"""Attention over a paged KV cache for a flat batch of requests, for any model that calls it with q, k and v.

Each request attends alone, over a view of the cache where its pages lie side by side (the page pool prefers that) and
over gathered rows where they do not. Query heads that share a KV head are folded into the rows, so keys and values are
read once. It must not know models or requests.

A row's result does not depend on how many rows its request has in the step, so that verifying a draft gives the bits that plain
decoding gives. Batched products and the softmax change their order of summation with the number of rows (below four) and with
the number of keys; so every run has at least four rows, and reads whole tiles of keys: rows whose tiles differ go into different
runs, and what lies behind a row's own position is masked.

Where kernels run (`paged_plan`) they do both halves, with the same property of their own; on CPUs that can run it, `row_attention`
computes every row alone, for all requests in one call.

Shapes: T rows of the flat batch, N query heads, K KV heads, G = N / K, D head size.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from dflash2_kernels import row_attention
from dflash2_kernels.kv_store import kv_store
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.paged_plan import PagedPlan, kernels_run, plan_pages

TILE = 64  # cache rows; every run reads whole tiles
_LEAST_ROWS = 4  # batched products of fewer rows take another inner loop


@dataclass(frozen=True)
class KVCache:
    """layers[i]: [num_pages * page_size + TILE, 2, K, D], keys and values of layer i; the last tile is only ever read, masked."""

    layers: list[torch.Tensor]


class _Run(NamedTuple):
    """Rows `start … stop - 1` attend to cache rows `where` (a slice, or indices); `bias` is added to the scores of the
    last columns: [1 or G * rows, columns], None where every row sees every key."""

    start: int
    stop: int
    where: slice | torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about one step's attention that is the same in every layer; runs by window, None being full attention. `paged` stands
    in for them where kernels run, `rows` where a CPU computes row by row."""

    slots: torch.Tensor
    runs: dict[int | None, list[_Run]]
    paged: PagedPlan | None = None
    rows: row_attention.RowSpans | None = None


def plan_attention(
    batch: AttentionBatch, windows: Iterable[int | None], num_groups: int, *, by_row: bool = False
) -> AttentionPlan:
    """Prepare one step. `windows`: the widths that occur among the layers; num_groups: G; by_row: what `runs_by_row` said at load."""
    device = batch.slots.device
    if kernels_run(device):
        return AttentionPlan(batch.slots, {}, plan_pages(batch))
    if by_row:
        spans = [(span.row_start, span.num_rows, span.kv_len) for span in batch.spans]
        pages = [span.page_ids for span in batch.spans]
        return AttentionPlan(batch.slots, {}, rows=row_attention.RowSpans(spans, pages, batch.page_size))
    runs: dict[int | None, list[_Run]] = {}
    for window in windows:
        runs[window] = [
            run for span in batch.spans for run in _span_runs(span, batch.page_size, window, num_groups, device)
        ]
    return AttentionPlan(batch.slots, runs)


def runs_by_row(device: torch.device, head_dim: int) -> bool:
    """Whether attention of this thread's work on this device is `row_attention`'s: where torch has one thread, for its head sizes."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and row_attention.available(head_dim)


def _span_runs(span: Span, page_size: int, window: int | None, num_groups: int, device: torch.device) -> list[_Run]:
    """Neighbouring rows that read the same whole tiles of the cache share a run."""
    runs = []
    base = span.kv_len - span.num_rows
    row = 0
    while row < span.num_rows:
        low, high = tiles = _tiles(base + row, window)
        stop = row + 1
        while stop < span.num_rows and _tiles(base + stop, window) == tiles:
            stop += 1
        where = _cache_rows(span, page_size, low, min(high, span.kv_len), high, device)
        bias = _bias(base + row, stop - row, low, high, window, num_groups, device)
        runs.append(_Run(span.row_start + row, span.row_start + stop, where, bias))
        row = stop
    return runs


def _tiles(position: int, window: int | None) -> tuple[int, int]:
    """First and end position of the whole tiles that hold what a row at `position` sees."""
    low = 0 if window is None else max(0, position - window + 1)
    return low // TILE * TILE, -(-(position + 1) // TILE) * TILE


def _cache_rows(
    span: Span, page_size: int, low: int, stop: int, high: int, device: torch.device
) -> slice | torch.Tensor:
    """Where positions low … high - 1 are; those from `stop` on are behind the request's end, and masked."""
    pages = span.page_ids[low // page_size : -(-stop // page_size)]
    if all(page == pages[0] + index for index, page in enumerate(pages)):
        offset = pages[0] * page_size - low // page_size * page_size
        return slice(offset + low, offset + high)
    positions = torch.arange(low, stop)
    table = torch.tensor(pages, dtype=torch.int64)
    rows = table[positions // page_size - low // page_size] * page_size + positions % page_size
    return F.pad(rows, (0, high - stop)).to(device)


def _bias(
    first: int, num_rows: int, low: int, high: int, window: int | None, num_groups: int, device: torch.device
) -> torch.Tensor | None:
    """-inf where a row sees nothing, for the last columns: all of them if a window hides early ones, else those behind the
    first row's own position."""
    repeats = 1 if num_rows == 1 else num_groups
    if window is not None and first + num_rows - window > low:
        rows = torch.arange(first, first + num_rows, device=device)[:, None]
        columns = torch.arange(low, high, device=device)[None, :]
        hidden = (columns > rows) | (rows - columns >= window)
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf")).repeat(repeats, 1)
    width = high - first - 1
    if width == 0:
        return None
    build = _few_rows_bias if num_rows <= 32 else _causal_bias
    return build(num_rows, width, repeats, device)


def _causal_bias(num_rows: int, width: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """Row i sees the first i of `width` columns: [G * num_rows, width]."""
    return torch.full((num_rows, width), float("-inf"), device=device).triu_(0).repeat(num_groups, 1)


_few_rows_bias = functools.lru_cache(maxsize=4096)(_causal_bias)  # decoding asks for the same few again and again


def attend(
    plan: AttentionPlan, query: torch.Tensor, cache: torch.Tensor, scaling: float, window: int | None = None
) -> torch.Tensor:
    """query [P, N, D], P ≥ T, against one layer's cache [slots, 2, K, D] → [P, N * D]; rows from T on are zero.

    The step's own keys and values must be stored already.
    """
    if plan.paged is not None:
        return plan.paged.attend(query, cache, scaling, window)
    if plan.rows is not None:
        return row_attention.row_attention(query, cache, plan.rows, scaling, window)
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    groups = num_heads // num_kv_heads
    spare = max(0, _LEAST_ROWS - groups)
    query = (query * scaling).view(num_rows, num_kv_heads, groups, head_dim)
    single = F.pad(query, (0, 0, 0, spare)) if spare else query
    out = torch.zeros_like(single) if num_rows > plan.slots.shape[0] else torch.empty_like(single)
    all_keys, all_values = _heads_first(cache)
    for start, stop, where, bias in plan.runs[window]:
        if isinstance(where, slice):
            keys, values = all_keys[:, :, where], all_values[:, where]
        else:
            keys, values = _heads_first(cache[where])
        rows = stop - start
        if rows == 1:
            torch.bmm(_weights(torch.bmm(single[start], keys), bias), values, out=out[start])
            continue
        folded = query[start:stop].permute(1, 2, 0, 3).reshape(num_kv_heads, groups * rows, head_dim)
        missing = _LEAST_ROWS - groups * rows
        if missing > 0:
            folded = F.pad(folded, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, 0, 0, missing))
        mixed = torch.bmm(_weights(torch.bmm(folded, keys), bias), values)[:, : groups * rows]
        out[start:stop, :, :groups] = mixed.view(num_kv_heads, groups, rows, head_dim).permute(2, 0, 1, 3)
    return out[:, :, :groups].reshape(num_rows, num_heads * head_dim)


def _weights(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        scores.narrow(2, scores.shape[2] - bias.shape[1], bias.shape[1]).add_(bias)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _heads_first(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [K, D, n] of the keys and [K, n, D] of the values in [n, 2, K, D]; gathered rows must be laid out like rows in
    place, or the products differ in the last bit."""
    return rows[:, 0].permute(1, 2, 0), rows[:, 1].transpose(0, 1)


def store(plan: AttentionPlan, cache: torch.Tensor, kv: torch.Tensor) -> None:
    """Write a step's key and value rows [T, 2, K, D] into one layer's cache."""
    if plan.paged is not None:
        kv_store(kv, plan.slots, cache)
    else:
        cache.index_copy_(0, plan.slots, kv)
