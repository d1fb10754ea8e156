"""Never two owners of one page, never a leak, whatever the order of calls."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash2_ray.core.page_pool import PagePool


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(24)
        self.sizes = {}
        self.counter = 0

    @rule(expected=st.integers(0, 30))
    def open(self, expected):
        owner = f"r{self.counter}"
        self.counter += 1
        self.pool.open(owner, expected)
        self.sizes[owner] = 0

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), num_pages=st.integers(0, 12))
    def grow(self, data, num_pages):
        owner = data.draw(st.sampled_from(sorted(self.sizes)))
        before = list(self.pool.table(owner))
        room = self.pool.num_free
        grown = self.pool.grow(owner, num_pages)
        assert grown == (num_pages - len(before) <= room)
        assert list(self.pool.table(owner))[: len(before)] == before
        if grown:
            self.sizes[owner] = max(self.sizes[owner], num_pages)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.sizes)))
        self.pool.release(owner)
        self.pool.release(owner)  # a late second release does no harm
        del self.sizes[owner]

    @invariant()
    def owners_are_disjoint_and_nothing_leaks(self):
        pages = [page for owner in self.sizes for page in self.pool.table(owner)]
        assert len(pages) == len(set(pages))
        assert all(0 <= page < 24 for page in pages)
        assert {owner: len(self.pool.table(owner)) for owner in self.sizes} == self.sizes
        assert self.pool.num_free == 24 - len(pages)
        assert set(self.pool.owners) == set(self.sizes)


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
