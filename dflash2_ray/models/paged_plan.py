"""One step's attention as the paged kernels want it: page tables and row numbers on the device, prepared once for all layers.

`attention` uses it wherever the kernels run; on a CPU it plans runs of its own. It must not know models or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash2_kernels.paged_attention import OPERATOR, paged_attention
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.integers import integers
from dflash2_ray.models.upload import upload

_SHORT = 32  # rows; a launch is sized by its longest span, so prompts' chunks get one of their own


@dataclass(frozen=True)
class Launch:
    """row_starts, num_rows, kv_lens [R] int32, page_table [R, pages] int32; the limits are host numbers. A request of 0 rows is padding."""

    row_starts: torch.Tensor
    num_rows: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    max_num_rows: int
    max_kv_len: int


@dataclass(frozen=True)
class PagedPlan:
    """See the module."""

    page_size: int
    launches: tuple[Launch, ...]

    def attend(self, query: torch.Tensor, cache: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
        """query [P, N, D] against one layer's cache [slots, 2, K, D] → [P, N * D]; rows of no span are zero."""
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        for one in self.launches:
            paged_attention(
                query, cache, one.page_table, one.row_starts, one.num_rows, one.kv_lens, self.page_size, scaling,
                max_num_rows=one.max_num_rows, max_kv_len=one.max_kv_len, window=window, out=out,
            )  # fmt: skip
        return out.flatten(1)


def kernels_run(device: torch.device) -> bool:
    """Whether attention on this device is a kernel's."""
    return OPERATOR.has_kernel(device)


def plan_pages(batch: AttentionBatch) -> PagedPlan:
    """Prepare one step."""
    short = [span for span in batch.spans if span.num_rows <= _SHORT]
    long = [span for span in batch.spans if span.num_rows > _SHORT]
    return PagedPlan(
        batch.page_size, tuple(_launch(spans, batch.page_size, batch.slots.device) for spans in (short, long) if spans)
    )


def _launch(spans: Sequence[Span], page_size: int, device: torch.device) -> Launch:
    counts = [-(-span.kv_len // page_size) for span in spans]
    width = max(counts)
    size = len(spans)
    room = (
        -(-size // 4) * 4
    )  # each part from a 16-byte boundary on: Triton compiles a kernel anew for pointers of another alignment
    numbers = []
    for column in (
        [span.row_start for span in spans],
        [span.num_rows for span in spans],
        [span.kv_len for span in spans],
    ):
        numbers += [*column, *([0] * (room - size))]
    for span, count in zip(spans, counts, strict=True):
        numbers += [*span.page_ids[:count], *([0] * (width - count))]
    flat = upload(integers(numbers, np.int32), device)  # one copy for all
    return Launch(
        flat[:size], flat[room : room + size], flat[2 * room : 2 * room + size], flat[3 * room :].view(size, width),
        max(span.num_rows for span in spans), max(span.kv_len for span in spans),
    )  # fmt: skip
