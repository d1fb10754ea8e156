"""Attention over a paged KV cache for a flat batch of requests, for any model that calls it with q, k and v.

Each request attends alone, over a view of the cache where its pages lie side by side (the page pool prefers that) and
over gathered rows where they do not. Query heads that share a KV head are folded into the rows, so keys and values are
read once. It must not know models or requests.

Shapes: T rows of the flat batch, N query heads, K KV heads, G = N / K, D head size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dflash2_ray.models.attention_batch import AttentionBatch, Span

MAX_QUERY_ROWS = 256  # bounds the score matrix of a long prefill chunk


@dataclass(frozen=True)
class KVCache:
    """layers[i]: [num_pages * page_size, 2, K, D], keys and values of layer i."""

    layers: list[torch.Tensor]


class _Run(NamedTuple):
    """Rows `start … stop - 1` attend to cache rows `where` (a slice, or indices); `bias` is added to the scores of the
    last columns: [G * rows, columns], None where every row sees every key."""

    start: int
    stop: int
    where: slice | torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about one step's attention that is the same in every layer; by window, None being full attention."""

    slots: torch.Tensor
    runs: dict[int | None, list[_Run]]


def plan_attention(batch: AttentionBatch, windows: Iterable[int | None], num_groups: int) -> AttentionPlan:
    """Prepare one step. `windows`: the widths that occur among the layers; num_groups: G."""
    device = batch.slots.device
    runs: dict[int | None, list[_Run]] = {}
    for window in windows:
        runs[window] = [
            run for span in batch.spans for run in _span_runs(span, batch.page_size, window, num_groups, device)
        ]
    return AttentionPlan(batch.slots, runs)


def _span_runs(span: Span, page_size: int, window: int | None, num_groups: int, device: torch.device) -> list[_Run]:
    runs = []
    base = span.kv_len - span.num_rows
    for offset in range(0, span.num_rows, MAX_QUERY_ROWS):
        num_rows = min(MAX_QUERY_ROWS, span.num_rows - offset)
        first = base + offset
        last = first + num_rows - 1
        low = 0 if window is None else max(0, first - window + 1)
        where = _cache_rows(span, page_size, low, last + 1, device)
        start = span.row_start + offset
        bias = None
        if window is not None and last >= window and num_rows > 1:
            bias = _windowed_bias(first, num_rows, low, window, num_groups, device)
        elif num_rows > 1:
            bias = _causal_bias(num_rows, num_groups, device)
        runs.append(_Run(start, start + num_rows, where, bias))
    return runs


def _cache_rows(span: Span, page_size: int, low: int, high: int, device: torch.device) -> slice | torch.Tensor:
    pages = span.page_ids[low // page_size : -(-high // page_size)]
    if all(page == pages[0] + index for index, page in enumerate(pages)):
        offset = pages[0] * page_size - low // page_size * page_size
        return slice(offset + low, offset + high)
    positions = torch.arange(low, high)
    table = torch.tensor(pages, dtype=torch.int64)
    rows = table[positions // page_size - low // page_size] * page_size + positions % page_size
    return rows.to(device)


_causal: dict[tuple[int, int, torch.device], torch.Tensor] = {}


def _causal_bias(num_rows: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """-inf above the diagonal, for the last `num_rows` columns: [G * num_rows, num_rows]."""
    key = (num_rows, num_groups, device)
    if key not in _causal:
        upper = torch.full((num_rows, num_rows), float("-inf"), device=device).triu_(1)
        _causal[key] = upper.repeat(num_groups, 1)
    return _causal[key]


def _windowed_bias(
    first: int, num_rows: int, low: int, window: int, num_groups: int, device: torch.device
) -> torch.Tensor:
    """A row at position i sees j with i - window < j <= i: [G * num_rows, first + num_rows - low]."""
    rows = torch.arange(first, first + num_rows, device=device)[:, None]
    columns = torch.arange(low, first + num_rows, device=device)[None, :]
    hidden = (columns > rows) | (rows - columns >= window)
    bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return bias.repeat(num_groups, 1)


def attend(
    plan: AttentionPlan, query: torch.Tensor, cache: torch.Tensor, scaling: float, window: int | None = None
) -> torch.Tensor:
    """query [P, N, D], P ≥ T, against one layer's cache [slots, 2, K, D] → [P, N * D]; rows from T on are zero.

    The step's own keys and values must be stored already.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    groups = num_heads // num_kv_heads
    query = (query * scaling).view(num_rows, num_kv_heads, groups, head_dim)
    out = torch.zeros_like(query) if num_rows > plan.slots.shape[0] else torch.empty_like(query)
    all_keys, all_values = _heads_first(cache)
    for start, stop, where, bias in plan.runs[window]:
        rows = stop - start
        one = rows == 1
        folded = query[start] if one else query[start:stop].permute(1, 2, 0, 3).reshape(num_kv_heads, groups * rows, head_dim)
        if isinstance(where, slice):
            keys, values = all_keys[:, :, where], all_values[:, where]
        else:
            keys, values = _heads_first(cache[where])
        scores = torch.bmm(folded, keys)
        if bias is not None:
            scores[:, :, scores.shape[2] - bias.shape[1] :] += bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        if one:
            torch.bmm(weights, values, out=out[start])
        else:
            mixed = torch.bmm(weights, values).view(num_kv_heads, groups, rows, head_dim)
            out[start:stop] = mixed.permute(2, 0, 1, 3)
    return out.view(num_rows, num_heads * head_dim)


def _heads_first(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [K, D, n] of the keys and [K, n, D] of the values in [n, 2, K, D]; gathered rows must be laid out like rows in
    place, or the products differ in the last bit."""
    return rows[:, 0].permute(1, 2, 0), rows[:, 1].transpose(0, 1)


def store(plan: AttentionPlan, cache: torch.Tensor, kv: torch.Tensor) -> None:
    """Write a step's key and value rows [T, 2, K, D] into one layer's cache."""
    cache.index_copy_(0, plan.slots, kv)
