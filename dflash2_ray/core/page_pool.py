"""Who reads and writes which KV pages. Pure bookkeeping: it must not know tensors, devices or requests beyond an owner's name.

A page is written by one owner at most, and read by every owner whose table has it: pages with a key in the prefix cache are shared, and
never written again. A page that nobody reads any more is free; as long as it has its key it is *idle*: free as well, but handed out
last, those that were left longest ago first.

Pages of one owner are handed out side by side where possible, because a run of consecutive pages can be read in place while a
scattered table has to be gathered first: `open` looks for a gap in which the owner's expected length fits and keeps others out of it
while there is other room. Correctness never depends on it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from dflash2_ray.core.prefix_cache import PrefixCache

_YES, _NO = 1, 0
_MOST_IDLE_SEEN = 4096  # pages that one search for a gap goes through


class PagePool:
    """`num_pages` pages, numbered from 0."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages  # idle ones included
        self.cache = PrefixCache()
        self._num_readers = [0] * num_pages
        self._free = bytearray([_YES]) * num_pages  # nobody reads it
        self._claimed = bytearray(num_pages)  # lies in somebody's gap
        self._blank = bytearray([_YES]) * num_pages  # free, not idle, and in nobody's gap
        self._idle: OrderedDict[int, None] = OrderedDict()  # left longest ago first
        self._tables: dict[str, list[int]] = {}
        self._claims: dict[str, range] = {}

    def open(self, owner: str, expected_pages: int, shared: Sequence[int] = ()) -> None:
        """Begin a table for `owner` with pages out of the prefix cache, which will probably grow to `expected_pages` in all."""
        assert owner not in self._tables, f"page table of {owner!r} is open already"
        for page in shared:
            assert page in self.cache, f"page {page} has no key: its owner may write it"
            self._take(page)
        self._tables[owner] = list(shared)
        claim = self._find_gap(expected_pages - len(shared), shared[-1] + 1 if shared else self.num_pages)
        if claim:
            self._claims[owner] = claim
            self._claimed[claim.start : claim.stop] = bytes([_YES]) * len(claim)
            self._blank[claim.start : claim.stop] = bytes(len(claim))

    def _find_gap(self, num_pages: int, beside: int) -> range:
        """A run of pages that nobody reads or keeps others out of: from `beside` on, if they are blank; else the first blank ones; else
        those with the least recently used idle ones among them. Empty where there is none."""
        if not 0 < num_pages <= self.num_pages:
            return range(0)
        blank = bytes([_YES]) * num_pages
        if self._blank.startswith(blank, beside):
            return range(beside, beside + num_pages)
        start = self._blank.find(blank)
        if start >= 0:
            return range(start, start + num_pages)
        room = bytearray(self._blank)
        for page in islice(self._idle, _MOST_IDLE_SEEN):
            if self._claimed[page]:
                continue
            room[page] = _YES
            start, stop = room.rfind(_NO, 0, page) + 1, room.find(_NO, page)
            if (stop if stop >= 0 else self.num_pages) - start >= num_pages:
                return range(start, start + num_pages)
        return range(0)

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
            if page in self._idle:
                self.cache.drop(page)
            self._take(page)
            table.append(page)
        return True

    def _take(self, page: int) -> None:
        self._num_readers[page] += 1
        if self._num_readers[page] == 1:
            self.num_free -= 1
            self._free[page] = self._blank[page] = _NO
            self._idle.pop(page, None)

    def _next_page(self, owner: str, table: list[int]) -> int:
        claim = self._claims.get(owner)
        nearest = [table[-1] + 1] if table else []
        if claim is not None:
            nearest.insert(1 if table and table[-1] in claim else 0, claim.start)
        for page in nearest:
            if page < self.num_pages and (
                self._blank[page] or (claim is not None and self._free[page] and page in claim)
            ):
                return page
        page = self._blank.find(_YES)
        if page >= 0:
            return page
        for page in self._idle:
            if not self._claimed[page]:
                return page
        return next(
            (page for page in range(self.num_pages) if self._free[page] and page not in self._idle),
            next(iter(self._idle), -1),
        )

    def publish(self, owner: str, index: int, key: bytes, *, has_rows: bool) -> None:
        """The page at `index` of the table of `owner` is full of committed tokens and will not be written again: others that look for
        `key` may read it. Nothing happens where it is shared already, or where another page has the key."""
        replaced = self.cache.put(key, self._tables[owner][index], has_rows=has_rows)
        if replaced is not None and self._free[replaced]:
            del self._idle[replaced]
            self._blank[replaced] = _NO if self._claimed[replaced] else _YES

    def num_read(self, pages: Sequence[int]) -> int:
        """How many of these somebody reads."""
        return sum(not self._free[page] for page in pages)

    def table(self, owner: str) -> Sequence[int]:
        """Page ids of `owner`, in position order. The list is live: it grows with `grow`."""
        return self._tables[owner]

    def release(self, owner: str) -> None:
        """`owner` reads no page any more; unknown owners are ignored, so that a late release does no harm."""
        claim = self._claims.pop(owner, range(0))
        self._claimed[claim.start : claim.stop] = bytes(len(claim))
        table = self._tables.pop(owner, [])
        for page in reversed(table):  # a page is of no use without those before it: the last one goes first
            self._num_readers[page] -= 1
            if not self._num_readers[page]:
                self.num_free += 1
                self._free[page] = _YES
                if page in self.cache:
                    self._idle[page] = None
        for page in (*table, *claim):
            self._blank[page] = _YES if self._free[page] and not self._claimed[page] and page not in self._idle else _NO

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, its counts included."""
        self.cache.clear()
        for page in self._idle:
            self._blank[page] = _NO if self._claimed[page] else _YES
        self._idle.clear()

    @property
    def owners(self) -> tuple[str, ...]:
        """Everybody whose table is open."""
        return tuple(self._tables)
