"""From a planned step and its drafts to the flat arrays that the target runs on, and back to each request's rows.

Shapes: T rows of the flat batch. It must not know how rows are computed or what they mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dflash2_ray.core.draft_port import Proposal
from dflash2_ray.core.page_pool import PagePool
from dflash2_ray.core.scheduler import Planned
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.integers import integers


@dataclass(frozen=True, slots=True)
class InputBatch:
    """token_ids, positions [T] int64; `row_starts[i]` is the first row of planned request i.

    `logit_rows`: rows whose logits are wanted: first, in order of the planned requests that sample, their last committed token
    and their drafts (`num_sampling_rows` in all), then the rows that tell the log-probabilities of prompt tokens, where asked
    for; None when that is every row in order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    row_starts: tuple[int, ...]
    logit_rows: torch.Tensor | None
    num_logit_rows: int
    num_sampling_rows: int


def build_input_batch(
    planned: Sequence[Planned], proposals: Mapping[str, Proposal], pool: PagePool, page_size: int, device: str
) -> InputBatch:
    """Lay the planned tokens and their drafts out in one flat batch."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    row_starts: list[int] = []
    logit_rows: list[int] = []
    prompt_rows: list[int] = []
    for part in planned:
        request, start = part.request, part.start
        row_start = len(token_ids)
        row_starts.append(row_start)
        token_ids += request.token_ids[start : start + part.num_tokens]
        proposal = proposals.get(request.request_id)
        if proposal is not None:
            token_ids += proposal.token_ids
        row_stop = len(token_ids)
        stop = start + row_stop - row_start
        pages = pool.table(request.request_id)
        positions += range(start, stop)
        _add_slots(slots, pages, page_size, start, stop)
        spans.append(Span(row_start, row_stop - row_start, stop, pages))
        if part.samples:
            logit_rows += range(row_start + part.num_tokens - 1, row_stop)
        if request.prompt_logprobs is not None:
            prompt_rows += [row_start + position - start for position in request.wanted_prompt_positions(start, part.num_tokens)]
    num_sampling_rows = len(logit_rows)
    every_row = num_sampling_rows == len(token_ids)
    logit_rows += prompt_rows
    on_device = _together([token_ids, positions, slots, [] if every_row else logit_rows], device)
    return InputBatch(
        token_ids=on_device[0],
        positions=on_device[1],
        attention=AttentionBatch(on_device[2], tuple(spans), page_size),
        row_starts=tuple(row_starts),
        logit_rows=None if every_row else on_device[3],
        num_logit_rows=len(logit_rows),
        num_sampling_rows=num_sampling_rows,
    )


def _add_slots(slots: list[int], pages: Sequence[int], page_size: int, start: int, stop: int) -> None:
    """Append the cache rows of positions start … stop - 1, page by page."""
    while start < stop:
        index, offset = divmod(start, page_size)
        first = pages[index] * page_size + offset
        count = page_size - offset
        if count > stop - start:
            count = stop - start
        slots += range(first, first + count)
        start += count


def _together(columns: Sequence[list[int]], device: str) -> list[torch.Tensor]:
    """The columns as int64 tensors that went to the device in one copy, each from a 16-byte boundary on, as kernels expect."""
    numbers: list[int] = []
    starts = []
    for column in columns:
        starts.append(len(numbers))
        numbers += [*column, 0] if len(column) % 2 else column
    whole = integers(numbers).to(device)
    return [whole[start : start + len(column)] for start, column in zip(starts, columns, strict=True)]
