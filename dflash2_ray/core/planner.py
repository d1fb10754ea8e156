"""Draft width and schedule of a step from measured times and acceptance: a pure function and the words it speaks.

    serial   T = T_v(B, Σ(w+1)) + T_d(B, Σ(w+1)) + C                        (W = 0: T_v alone)
    split    T = max(2 T_v(half), 2 T_d(half), T_v(half) + T_d(half) + C)   separate drafter only
    tokens/s = Σ_r (1 + Σ_{j ≤ w_r} S_j) / T                                w_r = min(W, the request's own limit)

Losslessness: the width is one number for the whole batch, and everything it may depend on is in `EarlierSteps` (taken
before the tokens of the step in question are drawn) and `Load` (counts). There is no way to hand it a token or a
draft. It must not hold state: what was chosen before comes in as an argument.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from dflash2_ray.core.step_times import StepTimes

Schedule = Literal["serial", "split"]
WIDTHS = (0, 1, 3, 5, 7, 11, 15, 23, 31)
WIDTH_GAIN = 1.03  # a change of width must promise this much more tokens/s
SCHEDULE_GAIN = 1.05


def width_grid(max_width: int) -> tuple[int, ...]:
    """The widths that may be chosen; the largest is always one of them."""
    return (*(width for width in WIDTHS if width < max_width), max_width)


@dataclass(frozen=True, slots=True)
class Load:
    """What is to decode: how many requests have each own limit of draft slots (0: a request that is not drafted for)."""

    limits: tuple[tuple[int, int], ...]  # (limit, requests), ascending

    @classmethod
    def of(cls, limits: Mapping[int, int]) -> "Load":
        return cls(tuple(sorted((limit, count) for limit, count in limits.items() if count)))

    @property
    def num_requests(self) -> int:
        return sum(count for _, count in self.limits)

    def num_drafted(self, width: int) -> int:
        """Requests that get a draft at batch-wide width `width`."""
        return sum(count for limit, count in self.limits if min(limit, width) > 0)

    def num_rows(self, width: int) -> int:
        """Rows of the verify pass."""
        return sum(count * (1 + min(limit, width)) for limit, count in self.limits)

    def num_draft_rows(self, width: int) -> int:
        """Rows of the draft pass."""
        return sum(count * (1 + min(limit, width)) for limit, count in self.limits if min(limit, width) > 0)


@dataclass(frozen=True, slots=True)
class EarlierSteps:
    """All that a decision may know: measurements of steps that are committed.

    survival[j - 1]: S_j. link_s: C, what a draft costs besides the drafter's work. separate: the drafter works while the
    target does.
    """

    verify_times: StepTimes
    draft_times: StepTimes
    survival: tuple[float, ...]
    link_s: float = 0.0
    separate: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one choice would bring. step_s: for the whole batch once (both halves of a split). tokens: committed in it."""

    width: int
    schedule: Schedule
    step_s: float
    tokens: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


def predict(earlier: EarlierSteps, load: Load, width: int, schedule: Schedule = "serial") -> Prediction | None:
    """Step time and tokens of one choice; None where the times needed are not known yet."""
    parts = 2 if schedule == "split" else 1
    verify_s = earlier.verify_times.lookup(load.num_requests / parts, load.num_rows(width) / parts)
    draft_s: float | None = 0.0
    link_s = 0.0
    num_drafted = load.num_drafted(width)
    if num_drafted:
        draft_s = earlier.draft_times.lookup(num_drafted / parts, load.num_draft_rows(width) / parts)
        link_s = earlier.link_s
    if verify_s is None or draft_s is None:
        return None
    if schedule == "split":
        step_s = max(2 * verify_s, 2 * draft_s, verify_s + draft_s + link_s)
    else:
        step_s = verify_s + draft_s + link_s
    accumulated = (0.0, *_running_sums(earlier.survival))
    tokens = sum(count * (1 + accumulated[min(limit, width)]) for limit, count in load.limits)
    return Prediction(width, schedule, step_s, tokens)


def choose(
    earlier: EarlierSteps,
    load: Load,
    widths: tuple[int, ...],
    schedules: tuple[Schedule, ...],
    held: tuple[int, Schedule],
) -> tuple[Prediction | None, Prediction | None]:
    """(prediction of what to run now, prediction of what is held) among `widths` × `schedules`.

    What is held stays unless another choice promises enough more. Without measurements: (None, None), keep what is held.
    """
    now = predict(earlier, load, *held)
    if now is None:
        return None, None
    best, best_score = now, now.tokens_per_s
    usable: tuple[Schedule, ...] = schedules if earlier.separate and load.num_requests > 1 else ("serial",)
    for schedule in usable:
        for width in widths:
            one = predict(earlier, load, width, schedule)
            if one is None or (width, schedule) == held:
                continue
            needed = WIDTH_GAIN if schedule == held[1] else SCHEDULE_GAIN
            if one.tokens_per_s >= needed * now.tokens_per_s and one.tokens_per_s > best_score:
                best, best_score = one, one.tokens_per_s
    return best, now


def shared_widths(counts: Mapping[int, int], draft_s: Callable[[int, int], float | None]) -> dict[int, int]:
    """At which width to draft for requests that need `width` slots: {needed width: drafted width}.

    counts: {needed width: requests}. draft_s(requests, rows): time of one draft pass, None if unknown. Every width is a
    pass of its own; a narrower group joins the next wider one where one common pass is expected to cost no more than two.
    A wider draft is cut to what was needed, so the verify pass does not grow.
    """
    result: dict[int, int] = {}
    total = into = 0
    for width in sorted(counts, reverse=True):
        number = counts[width]
        if result:
            joined = draft_s(total + number, (total + number) * (into + 1))
            alone = draft_s(number, number * (width + 1))
            before = draft_s(total, total * (into + 1))
            if joined is not None and alone is not None and before is not None and joined <= before + alone:
                result[width] = into
                total += number
                continue
        total, into = number, width
        result[width] = width
    return result


def _running_sums(values: tuple[float, ...]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(total)
    return sums
