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

    def index(self, rows: Sequence[int]) -> torch.Tensor | None:
        """Ascending rows of the batch as [len(rows)] int64 on its device; None for all of them."""
        device = self.token_ids.device
        return None if len(rows) == len(self.token_ids) else torch.tensor(rows, dtype=torch.int64).to(device)


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
        request = part.request
        row_start = len(token_ids)
        row_starts.append(row_start)
        token_ids.extend(request.token_ids[part.start : part.start + part.num_tokens])
        proposal = proposals.get(request.request_id)
        if proposal is not None:
            token_ids.extend(proposal.token_ids)
        num_rows = len(token_ids) - row_start
        pages = pool.table(request.request_id)
        positions.extend(range(part.start, part.start + num_rows))
        slots.extend(_slots(pages, page_size, part.start, part.start + num_rows))
        spans.append(Span(row_start, num_rows, part.start + num_rows, pages))
        if part.samples:
            logit_rows.extend(range(row_start + part.num_tokens - 1, row_start + num_rows))
        for position in request.wanted_prompt_positions(part.start, part.num_tokens):
            prompt_rows.append(row_start + position - part.start)
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


def _slots(pages: Sequence[int], page_size: int, start: int, stop: int) -> list[int]:
    """Cache rows of positions start … stop - 1, page by page."""
    slots: list[int] = []
    while start < stop:
        index, offset = divmod(start, page_size)
        count = min(page_size - offset, stop - start)
        first = pages[index] * page_size + offset
        slots.extend(range(first, first + count))
        start += count
    return slots


def _together(columns: Sequence[list[int]], device: str) -> list[torch.Tensor]:
    """The columns as int64 tensors that went to the device in one copy, each from a 16-byte boundary on, as kernels expect."""
    numbers: list[int] = []
    starts = []
    for column in columns:
        starts.append(len(numbers))
        numbers += [*column, 0] if len(column) % 2 else column
    whole = torch.tensor(numbers, dtype=torch.int64).to(device)
    return [whole[start : start + len(column)] for start, column in zip(starts, columns, strict=True)]
