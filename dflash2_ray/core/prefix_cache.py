"""Which page holds which run of tokens, so that a request that begins like an earlier one finds their keys and values again.

A full page of committed tokens is known by its key: a hash of its token ids and of the key of the page before it. So equal keys mean
equal tokens at equal positions from 0 on, and nothing else changes keys and values: one target, no adapters, text alone.
Some pages come without the drafter's context rows (their request did not speculate); those serve requests that are not drafted for.
It must not know who reads a page: `PagePool` counts that, and decides which page goes.
"""

import hashlib
from array import array
from collections.abc import Sequence

_ROOT = bytes(16)


def extend_keys(keys: list[bytes], token_ids: Sequence[int], page_size: int, num_pages: int) -> None:
    """Append to `keys`, those of the first pages of `token_ids`, until there are `num_pages`; full pages only."""
    while len(keys) < num_pages:
        start = len(keys) * page_size
        page = array("q", token_ids[start : start + page_size])
        assert len(page) == page_size, "only full pages have a key"
        keys.append(hashlib.blake2b((keys[-1] if keys else _ROOT) + page.tobytes(), digest_size=16).digest())


class PrefixCache:
    """Pages by key. num_queried_tokens, num_hit_tokens: of requests that were looked up, counted by whoever admits them."""

    def __init__(self) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._with_rows: set[int] = set()

    def __len__(self) -> int:
        """Pages that have a key."""
        return len(self._keys)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of `keys`, from the first on, that is known."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_drafted(self, pages: Sequence[int], num_needed: int | None) -> int:
        """The longest front of `pages` behind which a drafter can begin: the last `num_needed` of it (None: all) have context rows."""
        count = reach = 0
        for index, page in enumerate(pages):
            reach = reach + 1 if page in self._with_rows else 0
            if reach > index or (num_needed is not None and reach >= num_needed):
                count = index + 1
        return count

    def put(self, key: bytes, page: int, *, has_rows: bool) -> int | None:
        """Give `page` a key. A page that has it already keeps it, unless the new one brings the rows that the old one lacks:
        then the old one, which is returned, loses it."""
        known = self._pages.get(key)
        if known == page or (known is not None and (known in self._with_rows or not has_rows)):
            return None
        assert page not in self._keys, f"page {page} holds other tokens"
        if known is not None:
            self.drop(known)
        self._pages[key] = page
        self._keys[page] = key
        if has_rows:
            self._with_rows.add(page)
        return known

    def drop(self, page: int) -> None:
        """`page` will hold something else."""
        del self._pages[self._keys.pop(page)]
        self._with_rows.discard(page)

    def clear(self) -> None:
        """Know nothing, and have counted nothing."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._pages.clear()
        self._keys.clear()
        self._with_rows.clear()
