"""Who owns which KV pages. Pure bookkeeping: it must not know tensors, devices or requests beyond an owner's name.

A page has at most one owner. Pages of one owner are handed out side by side where possible, because a run of
consecutive pages can be read in place while a scattered table has to be gathered first: `open` looks for a gap in which
the owner's expected length fits and keeps others out of it while there is other room. Correctness never depends on it.
"""

from collections.abc import Sequence

_FREE, _TAKEN = 1, 0


class PagePool:
    """`num_pages` pages, numbered from 0."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free = bytearray([_FREE]) * num_pages  # 1: has no owner
        self._unclaimed = bytearray([_FREE]) * num_pages  # 1: has no owner and lies in nobody's gap
        self._tables: dict[str, list[int]] = {}
        self._claims: dict[str, range] = {}

    def open(self, owner: str, expected_pages: int) -> None:
        """Begin an empty table for `owner`, which will probably grow to `expected_pages`. Takes no page."""
        assert owner not in self._tables, f"page table of {owner!r} is open already"
        self._tables[owner] = []
        start = self._unclaimed.find(bytes([_FREE]) * expected_pages) if expected_pages <= self.num_pages else -1
        if start >= 0:
            self._claims[owner] = range(start, start + expected_pages)
            self._unclaimed[start : start + expected_pages] = bytes(expected_pages)

    def grow(self, owner: str, num_pages: int) -> bool:
        """Extend the table of `owner` to `num_pages` pages. False, and nothing changed, when too few are free."""
        table = self._tables[owner]
        missing = num_pages - len(table)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        for _ in range(missing):
            page = self._next_page(owner, table)
            self._free[page] = self._unclaimed[page] = _TAKEN
            table.append(page)
        self.num_free -= missing
        return True

    def _next_page(self, owner: str, table: list[int]) -> int:
        claim = self._claims.get(owner)
        beside = table[-1] + 1 if table else (claim.start if claim else self.num_pages)
        if beside < self.num_pages and self._free[beside] and (self._unclaimed[beside] or (claim and beside in claim)):
            return beside
        page = self._unclaimed.find(_FREE)
        return page if page >= 0 else self._free.find(_FREE)

    def table(self, owner: str) -> Sequence[int]:
        """Page ids of `owner`, in position order. The list is live: it grows with `grow`."""
        return self._tables[owner]

    def release(self, owner: str) -> None:
        """Give back all pages of `owner`; unknown owners are ignored, so that a late release does no harm."""
        claim = self._claims.pop(owner, None)
        table = self._tables.pop(owner, [])
        for page in table:
            self._free[page] = _FREE
        self.num_free += len(table)
        # A freed page may lie in another owner's gap, and a dropped gap may hold others' pages: derive, do not guess.
        for page in {*table, *(claim or ())}:
            claimed = any(page in other for other in self._claims.values())
            self._unclaimed[page] = _FREE if self._free[page] and not claimed else _TAKEN

    @property
    def owners(self) -> tuple[str, ...]:
        """Everybody whose table is open."""
        return tuple(self._tables)
