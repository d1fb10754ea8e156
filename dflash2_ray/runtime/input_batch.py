"""From a planned step and its drafts to the flat arrays that the target runs on, and back to each request's rows.

Laid out on the host; whoever runs it moves it. Shapes: T rows of the flat batch. It must not know how rows are computed or what they mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dflash2_ray.core.draft_port import Proposal
from dflash2_ray.core.page_pool import PagePool
from dflash2_ray.core.scheduler import Planned
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.integers import integers
from dflash2_ray.models.page_slots import add_slots
from dflash2_ray.models.upload import upload


@dataclass(frozen=True, slots=True)
class InputBatch:
    """token_ids, positions [T] int64; `row_starts[i]` is the first row of planned request i.

    `logit_rows`: rows whose logits are wanted: first, in order of the planned requests that sample, their last committed token
    and their drafts (`num_sampling_rows` in all), then the rows that tell the log-probabilities of prompt tokens, where asked
    for; None when that is every row in order. numbers: what all these tensors are parts of.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    row_starts: tuple[int, ...]
    logit_rows: torch.Tensor | None
    num_logit_rows: int
    num_sampling_rows: int
    numbers: torch.Tensor

    def on(self, device: str) -> "InputBatch":
        """The same batch on a device, moved in one copy."""
        if device == "cpu":
            return self
        numbers = upload(self.numbers, device)

        def moved(part: torch.Tensor) -> torch.Tensor:
            return numbers[part.storage_offset() : part.storage_offset() + part.shape[0]]

        return replace(
            self,
            token_ids=moved(self.token_ids),
            positions=moved(self.positions),
            attention=replace(self.attention, slots=moved(self.attention.slots)),
            logit_rows=None if self.logit_rows is None else moved(self.logit_rows),
            numbers=numbers,
        )

    def index(self, rows: Sequence[int]) -> torch.Tensor | None:
        """Ascending rows of the batch as [len(rows)] int64 in host memory; None for all of them."""
        return None if len(rows) == len(self.token_ids) else integers(rows)


def build_input_batch(
    planned: Sequence[Planned], proposals: Mapping[str, Proposal], pool: PagePool, page_size: int
) -> InputBatch:
    """Lay the planned tokens and their drafts out in one flat batch, on the host."""
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
        add_slots(slots, pages, page_size, start, stop)
        spans.append(Span(row_start, row_stop - row_start, stop, pages))
        if part.samples:
            logit_rows += range(row_start + part.num_tokens - 1, row_stop)
        if request.prompt_logprobs is not None:
            prompt_rows += [
                row_start + position - start for position in request.wanted_prompt_positions(start, part.num_tokens)
            ]
    num_sampling_rows = len(logit_rows)
    every_row = num_sampling_rows == len(token_ids)
    logit_rows += prompt_rows
    return lay_out(
        token_ids, positions, slots, None if every_row else logit_rows, spans, page_size,
        row_starts=row_starts, num_logit_rows=len(logit_rows), num_sampling_rows=num_sampling_rows,
    )  # fmt: skip


def lay_out(
    token_ids: list[int],
    positions: list[int],
    slots: list[int],
    logit_rows: list[int] | None,
    spans: Sequence[Span],
    page_size: int,
    *,
    row_starts: Sequence[int],
    num_logit_rows: int,
    num_sampling_rows: int,
) -> InputBatch:
    """A batch on the host, from its columns."""
    numbers, columns = _together([token_ids, positions, slots, logit_rows or []])
    return InputBatch(
        token_ids=columns[0],
        positions=columns[1],
        attention=AttentionBatch(columns[2], tuple(spans), page_size),
        row_starts=tuple(row_starts),
        logit_rows=None if logit_rows is None else columns[3],
        num_logit_rows=num_logit_rows,
        num_sampling_rows=num_sampling_rows,
        numbers=numbers,
    )


def _together(columns: Sequence[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The columns side by side as int64, and each as a part of it, from a 16-byte boundary on, as kernels expect."""
    numbers: list[int] = []
    starts = []
    for column in columns:
        starts.append(len(numbers))
        numbers += [*column, 0] if len(column) % 2 else column
    whole = integers(numbers)
    return whole, [whole[start : start + len(column)] for start, column in zip(starts, columns, strict=True)]
