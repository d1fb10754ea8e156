"""Numbers that only grow, as one flat dictionary: counters, counters by label, and histograms with the fixed buckets of `measures`.

Keys: `key`, `key/label value`; a histogram has `key/0` … `key/n` (observations per bucket, not summed up; n: beyond the last bound)
and `key/sum`. So ledgers are added and subtracted number by number, whoever kept them, and travel as plain values.
"""

from bisect import bisect_left
from collections.abc import Mapping

from dflash2_ray.core.measures import BOUNDS

Numbers = dict[str, float]
_BUCKETS = {
    key: (bounds, tuple(f"{key}/{index}" for index in range(len(bounds) + 1)), f"{key}/sum")
    for key, bounds in BOUNDS.items()
}


class Ledger:
    """`numbers` may be read by another thread at any time (`copy`); one thread writes."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: Numbers = {}

    def add(self, key: str, amount: float = 1) -> None:
        """Count. Nothing is kept for 0."""
        if amount:
            self.numbers[key] = self.numbers.get(key, 0) + amount

    def observe(self, key: str, value: float, count: int = 1) -> None:
        """Put `count` observations of `value` into the histogram `key`."""
        bounds, names, total = _BUCKETS[key]
        name = names[bisect_left(bounds, value)]
        numbers = self.numbers
        numbers[name] = numbers.get(name, 0) + count
        numbers[total] = numbers.get(total, 0) + value * count

    def clear(self) -> None:
        """Begin anew."""
        self.numbers = {}

    def copy(self) -> Numbers:
        """The numbers as they stand."""
        return self.numbers.copy()


def add_up(total: Numbers, growth: Mapping[str, float]) -> None:
    """Add `growth` to `total` in place."""
    for key, amount in growth.items():
        total[key] = total.get(key, 0) + amount


def growth_since(before: Mapping[str, float], now: Mapping[str, float]) -> Numbers:
    """What came to the numbers of one ledger between two readings."""
    return {key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)}


class Generations:
    """Ledgers that begin anew with every generation of processes, as one that never goes back."""

    def __init__(self) -> None:
        self._past: Numbers = {}
        self._generation: int | None = None
        self._latest: Mapping[str, float] = {}

    def note(self, generation: int, numbers: Mapping[str, float]) -> None:
        """The newest reading of a generation's ledger. One of an earlier generation than the last noted is ignored."""
        if self._generation is not None and generation < self._generation:
            return
        if generation != self._generation:
            add_up(self._past, self._latest)
            self._generation = generation
        self._latest = numbers

    def total(self) -> Numbers:
        """Over all generations."""
        total = self._past.copy()
        add_up(total, self._latest)
        return total
