"""Causal attention of a step's rows over paged fp32 keys and values, on a CPU with AVX512, one thread.

    out[t] = softmax(scaling · q[t] · Kᵀ) V over the keys that row t's position sees: those up to itself, the last `window` of them

One call per layer for all requests; a row is computed alone, over its own keys in one order, so its bits depend neither on neighbours
nor on how many rows its request has. Shapes: T rows in spans, N query heads, K KV heads, D head size: query [P, N, D], cache
[slots, 2, K, D], out [P, N · D]; rows of no span are zero. Bytes: reads keys and values once per row.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from dflash2_kernels.native import library

_HEAD_DIMS = frozenset(16 * vectors for vectors in (1, 2, 3, 4, 5, 6, 7, 8, 16))


def available(head_dim: int) -> bool:
    """Whether this machine can run it for heads of this size."""
    return head_dim in _HEAD_DIMS and library() is not None


class RowSpans:
    """Spans (first row, rows, kv_len) and their page ids, as the function reads them. Raises ValueError on rows without a position or a page."""

    def __init__(
        self, spans: Sequence[tuple[int, int, int]], page_ids: Sequence[Sequence[int]], page_size: int
    ) -> None:
        numbers: list[int] = []
        pages: list[int] = []
        for (start, rows, kv_len), own in zip(spans, page_ids, strict=True):
            if not 0 <= rows <= kv_len <= len(own) * page_size:
                raise ValueError(f"row_attention: {rows} rows of {kv_len} positions in {len(own)} pages of {page_size}")
            numbers += (start, rows, kv_len, len(pages))
            pages += own[: -(-kv_len // page_size)]
        self.count = len(spans)
        self.page_size = page_size
        self.last_row = max((start + rows for start, rows, _ in spans), default=0)
        self._numbers = torch.tensor(numbers + pages, dtype=torch.int32)
        self.spans = self._numbers.data_ptr()
        self.pages = self.spans + 4 * len(numbers)


def row_attention(
    query: torch.Tensor, cache: torch.Tensor, spans: RowSpans, scaling: float, window: int | None = None
) -> torch.Tensor:
    """See the module. Raises ValueError on what is not fp32, and on head sizes that are not `available`."""
    num_rows, num_heads, head_dim = query.shape
    if query.dtype != torch.float32 or cache.dtype != torch.float32 or head_dim not in _HEAD_DIMS:
        raise ValueError(
            f"row_attention: expected fp32 and a head size of {sorted(_HEAD_DIMS)}, got query {query.dtype}, cache {cache.dtype}, head size {head_dim}"
        )
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        query = query.contiguous()
    if not cache.is_contiguous() or spans.last_row > num_rows:
        raise ValueError(f"row_attention: expected a contiguous cache and {spans.last_row} rows, got {num_rows}")
    kv_heads = cache.shape[2]
    out = torch.zeros(num_rows, num_heads * head_dim)
    failed = _function()(
        query.data_ptr(), query.stride(0), cache.data_ptr(), out.data_ptr(), spans.spans, spans.count, spans.pages, spans.page_size,
        kv_heads, num_heads // kv_heads, head_dim, scaling, window or 0,
    )  # fmt: skip
    if failed:
        raise MemoryError("row_attention: no memory for its scores")
    return out


@functools.cache
def _function() -> Any:
    found = library()
    if found is None:
        raise RuntimeError("row_attention: this machine cannot run it")
    function = found.row_attention
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [
        pointer, number, pointer, pointer, pointer, number, pointer, number, number, number, number, ctypes.c_float, number,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function
