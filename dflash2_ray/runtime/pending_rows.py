"""Context rows that no commit has named yet, and what a commit makes of them; rows without those of some requests. Must not know
models or transports.

Shapes: n rows, H hidden.
"""

from collections.abc import Container, Sequence

import torch

from dflash2_ray.core.draft_port import Rows


def take_committed(
    pending: Sequence[tuple[int, torch.Tensor]], base_len: int, new_base_len: int
) -> tuple[list[torch.Tensor], int]:
    """The rows [n, H] of positions `base_len … reached - 1` out of `pending` (first position, rows), in whatever order and
    overlap they came, and `reached`: less than `new_base_len` where a row is missing. The first that came wins."""
    if len(pending) == 1:
        ((first, rows),) = pending
        if first == base_len and first + rows.shape[0] == new_base_len:
            return [rows], new_base_len
    pieces, reached = [], base_len
    for first, rows in sorted(pending, key=lambda one: one[0]):
        start, stop = max(first, reached), min(first + rows.shape[0], new_base_len)
        if start == reached and stop > start:
            pieces.append(rows[start - first : stop - first])
            reached = stop
    return pieces, reached


@torch.inference_mode()
def without_spans(message: Rows, dropped: Container[str]) -> Rows | None:
    """The rows without those of `dropped` requests; None when nothing is left."""
    spans, pieces, offset = [], [], 0
    for span in message.spans:
        if span.request_id not in dropped:
            spans.append(span)
            pieces.append(message.rows[offset : offset + span.num_rows])
        offset += span.num_rows
    if not spans:
        return None
    return Rows(tuple(spans), torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous())
