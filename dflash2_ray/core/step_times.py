"""How long a pass takes, by how many requests and rows it holds: measured, smoothed, monotone, and corrected as it runs.

    T(requests, rows) = θ(rows) + η · requests, times a drift common to all sizes

θ is kept per bucket of rows (widths about an eighth of the size), linear between them; η is what a request costs besides
its rows (its page table, its read of the keys). Drift follows what slows every size alike (neighbours on the machine, longer
contexts), so that sizes not seen lately stay comparable with those seen now. The machine is noisy: the first three
times of a size count by the shortest, later ones are clipped to a band before they are averaged.
It must not know what a pass computes, nor read a clock.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

_CELL_RATE = 0.05  # weight of one more time in the average of its size
_DRIFT_RATE = 0.1
_BAND = 1.5  # a time counts as at most this many times its expectation, and at least this part of it
_NUM_FIRST = 3


def bucket_of(rows: int) -> int:
    """Sizes that share one average: every size up to 16, then eight per doubling."""
    if rows <= 16:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return rows // step * step


@dataclass(slots=True)
class _Cell:
    """Times of one (requests, bucket) pair, drift taken out. `rows`: average of the sizes that fell into it."""

    rows: float
    seconds: float
    first: list[float] = field(default_factory=list)
    num_times: int = 0


class StepTimes:
    """Times of one kind of pass. `drift` is 1 at first."""

    def __init__(self) -> None:
        self.drift = 1.0
        self.per_request_s = 0.0
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._stale = False

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return bool(self._cells)

    def observe(self, num_requests: int, rows: int, seconds: float) -> None:
        """One finished pass over `rows` rows of `num_requests` requests that took `seconds`."""
        if num_requests <= 0 or rows <= 0 or seconds <= 0:
            return
        key = (num_requests, bucket_of(rows))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(float(rows), seconds / self.drift)
        self._stale = True
        cell.num_times += 1
        if cell.num_times <= _NUM_FIRST:
            cell.first.append(seconds / self.drift)
            cell.seconds = min(cell.first)  # a first pass may have compiled something, and noise only ever adds
            return
        cell.first = []
        level = cell.seconds * self.drift
        clipped = min(max(seconds, level / _BAND), level * _BAND)
        self.drift *= (clipped / level) ** _DRIFT_RATE
        cell.seconds += _CELL_RATE * (clipped / self.drift - cell.seconds)
        cell.rows += _CELL_RATE * (rows - cell.rows)

    def lookup(self, num_requests: float, rows: float) -> float | None:
        """Expected seconds; None when nothing is known. Below the smallest known size: its time; above the largest: along
        the last slope."""
        if not self._cells:
            return None
        if self._stale:
            self._fit()
        sizes, seconds = self._sizes, self._seconds
        at = bisect_right(sizes, rows)
        if at == 0:
            theta = seconds[0]
        elif at < len(sizes):
            share = (rows - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            theta = seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
        elif len(sizes) == 1:
            theta = seconds[0]
        else:
            theta = seconds[-1] + (rows - sizes[-1]) * self._last_slope()
        return (theta + self.per_request_s * num_requests) * self.drift

    def longest_within(self, num_requests: int, seconds: float, most: int) -> int:
        """The most rows, up to `most`, of a pass that takes at most `seconds`; 0 when none does or nothing is known."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            expected = self.lookup(num_requests, middle)
            if expected is None or expected > seconds:
                high = middle - 1
            else:
                low = middle
        return low

    def as_dict(self) -> dict[str, float]:
        """Milliseconds by rows, for one request; plain values."""
        return {str(round(size)): round(1000 * (self.lookup(1, size) or 0.0), 3) for size in self._sizes}

    # ---- fitting ----------------------------------------------------------------------------------------------------

    def _last_slope(self) -> float:
        """Seconds per row over the upper half of the known sizes: the last pair alone may be noise."""
        start = (len(self._sizes) - 1) // 2
        return (self._seconds[-1] - self._seconds[start]) / (self._sizes[-1] - self._sizes[start])

    def _fit(self) -> None:
        self._stale = False
        by_bucket: dict[int, list[tuple[int, _Cell]]] = {}
        for (num_requests, bucket), cell in self._cells.items():
            by_bucket.setdefault(bucket, []).append((num_requests, cell))
        self.per_request_s = _slope_over_requests(by_bucket)
        sizes: list[float] = []
        levels: list[tuple[float, float]] = []  # seconds, weight
        for bucket in sorted(by_bucket):
            cells = by_bucket[bucket]
            weights = [float(min(cell.num_times, 20)) for _, cell in cells]
            total = sum(weights)
            sizes.append(sum(w * cell.rows for w, (_, cell) in zip(weights, cells, strict=True)) / total)
            theta = (
                sum(w * (c.seconds - self.per_request_s * n) for w, (n, c) in zip(weights, cells, strict=True)) / total
            )
            levels.append((max(theta, 0.0), total))
        self._sizes, self._seconds = sizes, _non_decreasing(levels)


def _slope_over_requests(by_bucket: dict[int, list[tuple[int, _Cell]]]) -> float:
    """η: over all sizes that were seen with different numbers of requests, least squares within each size; 0 if none was."""
    product = square = 0.0
    smallest = float("inf")
    for cells in by_bucket.values():
        mean_requests = sum(n for n, _ in cells) / len(cells)
        mean_seconds = sum(cell.seconds for _, cell in cells) / len(cells)
        for n, cell in cells:
            product += (n - mean_requests) * (cell.seconds - mean_seconds)
            square += (n - mean_requests) ** 2
            smallest = min(smallest, cell.seconds / n)
    return min(max(product / square, 0.0), smallest) if square else 0.0


def _non_decreasing(levels: list[tuple[float, float]]) -> list[float]:
    """The closest non-decreasing sequence in weighted least squares (neighbours that fall are pooled)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, members
    for value, weight in levels:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, members in pools for _ in range(members)]
