"""The context rows of everything in the KV pages, so that a drafter can be told of a request that starts behind cached pages.

A row lies in the slot where its token's keys and values lie, so who owns a page owns its rows, and they live as long. What a slot
holds means nothing until its page is published with rows (`core.prefix_cache`). It must not know requests or messages.

Shapes: n rows, H hidden.
"""

from collections.abc import Sequence

import torch

from dflash2_ray.models.integers import integers
from dflash2_ray.models.page_slots import slots_of
from dflash2_ray.models.upload import upload


class KeptRows:
    """[num_pages * page_size, H], made with the first rows, of their kind and on their device."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._num_slots = num_pages * page_size
        self._rows: torch.Tensor | None = None

    @torch.inference_mode()
    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [n, H] into slots [n] int64, which may be in host memory."""
        if self._rows is None:
            self._rows = rows.new_zeros(self._num_slots, rows.shape[1])
        self._rows.index_copy_(0, upload(slots, rows.device), rows)

    @torch.inference_mode()
    def read(self, pages: Sequence[int], first: int, stop: int) -> torch.Tensor:
        """A copy [stop - first, H] of the rows of positions first … stop - 1 of the request whose page table begins with `pages`."""
        assert self._rows is not None, "pages have rows once some were written"
        slots = slots_of(pages, self.page_size, first, stop)
        return self._rows.index_select(0, upload(integers(slots), self._rows.device))
