"""The drafter's context keys and values of all requests, in pages of one tensor: for devices whose kernels read page tables, and for graphs,
which need addresses that stay. `draft_context` is the other form. It must not know requests or messages.

Shapes: L layers, K KV heads, D head size.
"""

import torch

from dflash2_ray.models.page_slots import slots_of


class ContextPages:
    """rows [num_pages * page_size, L, 2, K, D]: positions of a context lie as `page_slots` says."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.page_size = page_size
        self.rows = torch.zeros(
            num_pages * page_size, num_layers, 2, num_kv_heads, head_dim, dtype=dtype, device=device
        )
        self.free_pages = list(range(num_pages - 1, -1, -1))


class PagedContext:
    """One request's context. num_committed: positions first … num_committed - 1 are in, or on their way."""

    def __init__(self, pages: ContextPages, first: int = 0) -> None:
        self.num_committed = first
        self.page_ids: list[int] = []
        self._pages = pages

    def reserve(self, stop: int) -> bool:
        """Room for positions up to `stop - 1`; False, and nothing is taken, where no pages are left."""
        missing = -(-stop // self._pages.page_size) - len(self.page_ids)
        free = self._pages.free_pages
        if missing > len(free):
            return False
        if missing > 0:
            self.page_ids += reversed(free[-missing:])
            del free[-missing:]
        return True

    def slots(self, start: int, stop: int) -> list[int]:
        """Where positions start … stop - 1 lie."""
        return slots_of(self.page_ids, self._pages.page_size, start, stop)

    def release(self) -> None:
        """Give every page back."""
        self._pages.free_pages += reversed(self.page_ids)
        self.page_ids, self.num_committed = [], 0
