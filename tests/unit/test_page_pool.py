"""Never two writers of a page, never a leak, never a page evicted that somebody reads, whatever the order of calls."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash2_ray.core.page_pool import PagePool
from dflash2_ray.core.prefix_cache import PrefixCache, extend_keys


class PagePoolMachine(RuleBasedStateMachine):
    """Pages of one token each, out of two tokens, so that owners share much. `written[page]`: the key of what it holds."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(24)
        self.keys = {}
        self.published = {}
        self.written = {}
        self.counter = 0

    def owners(self):
        return sorted(self.keys)

    @rule(
        expected=st.integers(0, 30),
        tokens=st.lists(st.integers(0, 1), min_size=12, max_size=12),
        most=st.integers(0, 12),
    )
    def open(self, expected, tokens, most):
        owner = f"r{self.counter}"
        self.counter += 1
        self.keys[owner] = []
        extend_keys(self.keys[owner], tokens, 1, 12)
        shared = self.pool.cache.find(self.keys[owner][:most])
        room, num_idle = self.pool.num_free, len(shared) - self.pool.num_read(shared)
        self.pool.open(owner, expected, shared)
        assert list(self.pool.table(owner)) == shared
        assert self.pool.num_free == room - num_idle
        self.published[owner] = len(shared)

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), num_pages=st.integers(0, 12))
    def grow(self, data, num_pages):
        owner = data.draw(st.sampled_from(self.owners()))
        before = list(self.pool.table(owner))
        room = self.pool.num_free
        others = {page for other in self.keys for page in self.pool.table(other)}
        grown = self.pool.grow(owner, num_pages)
        assert grown == (num_pages - len(before) <= room)
        table = list(self.pool.table(owner))
        assert table[: len(before)] == before
        assert len(table) == (max(len(before), num_pages) if grown else len(before))
        for index in range(len(before), len(table)):
            assert table[index] not in others, "somebody reads this page"
            self.written[table[index]] = self.keys[owner][index]

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), has_rows=st.booleans())
    def publish(self, data, has_rows):
        owner = data.draw(st.sampled_from(self.owners()))
        index = self.published[owner]
        if index < len(self.pool.table(owner)):
            self.pool.publish(owner, index, self.keys[owner][index], has_rows=has_rows)
            self.published[owner] += 1

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(self.owners()))
        self.pool.release(owner)
        self.pool.release(owner)  # a late second release does no harm
        del self.keys[owner], self.published[owner]

    @rule()
    def forget_prefixes(self):
        self.pool.forget_prefixes()
        assert len(self.pool.cache) == 0

    @invariant()
    def every_owner_reads_what_it_is_to_read(self):
        for owner, keys in self.keys.items():
            table = self.pool.table(owner)
            assert len(table) == len(set(table))
            assert [self.written[page] for page in table] == keys[: len(table)]

    @invariant()
    def what_is_shared_has_a_key_and_holds_its_tokens(self):
        for page, key in self.written.items():
            readers = sum(page in self.pool.table(owner) for owner in self.keys)
            found = self.pool.cache.find([key])
            assert all(self.written[one] == key for one in found)
            assert readers == self.pool._num_readers[page]

    @invariant()
    def nothing_leaks(self):
        pages = {page for owner in self.keys for page in self.pool.table(owner)}
        assert all(0 <= page < 24 for page in pages)
        assert self.pool.num_free == 24 - len(pages)
        assert set(self.pool.owners) == set(self.keys)


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_requests_that_fit_grow_in_place():
    pool = PagePool(32)
    for owner in ("a", "b", "c"):
        pool.open(owner, 8)
    for size in range(1, 9):  # interleaved growth, as in decoding
        for owner in ("a", "b", "c"):
            assert pool.grow(owner, size)
    for owner in ("a", "b", "c"):
        table = list(pool.table(owner))
        assert table == list(range(table[0], table[0] + 8))


def keep(pool, owner, num_pages):
    """A request that comes, is computed and goes; returns (keys, pages), which stay idle."""
    keys = []
    extend_keys(keys, [ord(owner[0])] * num_pages, 1, num_pages)
    pool.open(owner, num_pages)
    assert pool.grow(owner, num_pages)
    pages = list(pool.table(owner))
    for index, key in enumerate(keys):
        pool.publish(owner, index, key, has_rows=True)
    pool.release(owner)
    return keys, pages


def test_requests_that_share_nothing_lie_side_by_side_in_a_pool_full_of_idle_pages():
    pool = PagePool(32)
    kept = {owner: keep(pool, owner, 8) for owner in "abcd"}
    assert [pages for _, pages in kept.values()] == [list(range(start, start + 8)) for start in range(0, 32, 8)]
    keys, pages = kept["a"]
    pool.open("again", 8, pool.cache.find(keys))  # used again: b is now what was left longest ago
    pool.release("again")
    for size, owner in ((8, "b"), (8, "c")):
        pool.open(f"new {owner}", size)
        assert pool.grow(f"new {owner}", size)
        assert list(pool.table(f"new {owner}")) == kept[owner][1]
    assert pool.cache.find(keys) == pages
    assert pool.cache.find(kept["b"][0]) == []


def test_a_request_that_goes_on_behind_its_cached_pages_lies_behind_them():
    pool = PagePool(32)
    keep(pool, "a", 4)
    keys, pages = keep(pool, "b", 6)
    pool.open("next turn", 12, pool.cache.find(keys))
    assert pool.grow("next turn", 12)
    assert list(pool.table("next turn")) == list(range(pages[0], pages[0] + 12))


def test_the_least_recently_used_page_goes_first_and_the_end_of_a_prefix_before_its_beginning():
    pool = PagePool(8)
    old, _ = keep(pool, "old", 4)
    young, _ = keep(pool, "young", 4)
    pool.open("n", 0)
    for left in (3, 2, 1, 0):
        assert pool.grow("n", 4 - left)
        assert len(pool.cache.find(old)) == left
    assert len(pool.cache.find(young)) == 4
    assert pool.num_free == 4


def test_a_page_with_context_rows_takes_the_place_of_one_without():
    pool = PagePool(8)
    written = []
    for owner, has_rows in (("plain", False), ("drafted", True), ("late", False)):
        keys = []
        extend_keys(keys, [7, 8], 2, 1)
        pool.open(owner, 1)
        assert pool.grow(owner, 1)
        written.append(pool.table(owner)[0])
        pool.publish(owner, 0, keys[0], has_rows=has_rows)
    (key,) = keys
    assert pool.cache.find([key]) == [written[1]]
    for owner in ("plain", "drafted", "late"):
        pool.release(owner)
    assert pool.num_free == 8
    assert len(pool.cache) == 1


def test_where_a_drafter_can_begin():
    cache = PrefixCache()
    keys = []
    extend_keys(keys, range(12), 2, 6)
    for page, has_rows in enumerate([True, True, False, True, True, False]):
        cache.put(keys[page], page, has_rows=has_rows)
    pages = cache.find(keys)
    assert pages == list(range(6))
    assert cache.num_drafted(pages, None) == 2
    assert cache.num_drafted(pages, 2) == 5
    assert cache.num_drafted(pages, 3) == 2
    assert cache.num_drafted(pages[:1], 3) == 1
    assert cache.num_drafted([], 3) == 0


def test_keys_tell_equal_tokens_behind_different_ones_apart():
    keys, others = [], []
    extend_keys(keys, [1, 2, 3, 4, 1, 2], 2, 3)
    extend_keys(others, [9, 9, 3, 4], 2, 2)
    assert len({*keys, *others}) == 5
    begun = keys[:1]
    extend_keys(begun, [1, 2, 3, 4, 1, 2], 2, 3)
    assert begun == keys


def test_everything_comes_back():
    pool = PagePool(8)
    pool.open("a", 4)
    assert pool.grow("a", 8)
    assert not pool.grow("a", 9)
    pool.open("b", 4)
    assert not pool.grow("b", 1)
    pool.release("a")
    assert pool.num_free == 8
    assert pool.grow("b", 8)
