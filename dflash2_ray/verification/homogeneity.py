"""Do two samples come from one law? Chi-square over cells that depend on both samples together alone, and what it would find."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

MIN_CELL = 20  # values of a cell over both samples: ten expected in each, so that small p-values are not too small
_NUM_RARE = 8


@dataclass(frozen=True)
class Homogeneity:
    """Statistics of independent pairs of samples (of `size` values each) add up. degrees 0: nothing varied enough to be tested."""

    statistic: float = 0.0
    degrees: int = 0
    num_pairs: int = 0
    size: int = 0

    def __add__(self, other: "Homogeneity") -> "Homogeneity":
        if not self.degrees or not other.degrees:
            return self if self.degrees else other
        return Homogeneity(
            self.statistic + other.statistic,
            self.degrees + other.degrees,
            self.num_pairs + other.num_pairs,
            min(self.size, other.size),
        )

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large when the laws are equal."""
        return float(chi2.sf(self.statistic, self.degrees)) if self.degrees else 1.0

    def power(self, shift: float, alpha: float) -> float:
        """Least probability of p < alpha when every pair's laws differ by `shift` in total variation (over the cells).

        Among laws m ± e/2 with that distance, the noncentrality size · Σ e²/(2 m) is smallest at 2 · size · shift².
        """
        if not self.degrees:
            return 0.0
        return float(
            ncx2.sf(chi2.isf(alpha, self.degrees), self.degrees, max(2 * self.size * self.num_pairs * shift**2, 1e-12))
        )

    def detectable(self, alpha: float, power: float = 0.9) -> float:
        """The smallest shift in total variation that is found with at least this power; inf when even 1 is not."""
        if self.power(1.0, alpha) < power:
            return math.inf
        return float(brentq(lambda shift: self.power(shift, alpha) - power, 1e-6, 1.0))


def homogeneity(one: Sequence[Hashable], other: Sequence[Hashable]) -> Homogeneity:
    """Test of one pair of equally large samples. Values seen too seldom are dealt out to eight cells, the most frequent first; cells
    that are still too small become one. What is pooled depends on the totals alone, so pooling moves no p-value."""
    if len(one) != len(other):
        raise ValueError(f"expected samples of equal size, got {len(one)} and {len(other)}")
    totals = Counter(one) + Counter(other)
    cell_of: dict[Hashable, Hashable] = {value: ("value", value) for value in totals}
    rare = sorted(
        (value for value, count in totals.items() if count < MIN_CELL), key=lambda value: (-totals[value], repr(value))
    )
    cell_of |= {value: ("rare", index % _NUM_RARE) for index, value in enumerate(rare)}
    for _ in range(2):  # small cells into one; if that is small too, into the smallest other one
        sizes: Counter[Hashable] = Counter()
        for value, count in totals.items():
            sizes[cell_of[value]] += count
        small = {cell for cell, count in sizes.items() if count < MIN_CELL}
        if small:
            others = [cell for cell in sizes if cell not in small]
            alone = sum(sizes[cell] for cell in small) < MIN_CELL
            into: Hashable = (
                min(others, key=lambda cell: (sizes[cell], repr(cell))) if others and alone else ("rest", None)
            )
            cell_of = {value: into if cell in small else cell for value, cell in cell_of.items()}
    counts = [Counter(cell_of[value] for value in sample) for sample in (one, other)]
    cells = set(cell_of.values())
    if len(cells) < 2:
        return Homogeneity()
    statistic = sum((counts[0][cell] - counts[1][cell]) ** 2 / (counts[0][cell] + counts[1][cell]) for cell in cells)
    return Homogeneity(statistic, len(cells) - 1, 1, len(one))
