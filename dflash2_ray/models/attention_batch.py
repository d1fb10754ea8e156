"""How the rows of one flat step batch map to requests and to KV pages. Plain indices; it must not know the scheduler.

Shapes: T rows of the flat batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Span:
    """Rows of one request: `row_start … row_start + num_rows - 1` hold its positions `kv_len - num_rows … kv_len - 1`.

    kv_len counts the rows of this step. page_ids covers at least `kv_len` positions, in order; position `i` lives in
    slot `page_ids[i // page_size] * page_size + i % page_size`.
    """

    row_start: int
    num_rows: int
    kv_len: int
    page_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """slots [T] int64: where each row's key and value are stored. Spans tile the rows in order, without gaps."""

    slots: torch.Tensor
    spans: tuple[Span, ...]
    page_size: int
