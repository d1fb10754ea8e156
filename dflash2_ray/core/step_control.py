"""What a step loop asks before each step (which draft width, which schedule) and tells after it (times, acceptance).

Holds the measurements, what is chosen now, and the little state that keeps it steady: a width is looked at again every 16
steps or when the load changes, and rarely another width is tried for one step, so that what is not in use does not stay
unknown. It must not know requests, tokens, tensors or clocks.
"""

from dataclasses import dataclass
from typing import Any

from dflash2_ray.core.acceptance import Acceptance, survival
from dflash2_ray.core.planner import (
    EarlierSteps,
    Load,
    Prediction,
    Schedule,
    choose,
    predict,
    shared_widths,
    width_grid,
)
from dflash2_ray.core.step_times import StepTimes

STEPS_BETWEEN_CHOICES = 16
STEPS_BETWEEN_PROBES = 32
PROBE_SHARE = 0.005  # of the time, at most, that probes may cost
_SHOWN_RATE = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """How the next step runs. `is_probe`: the width is tried for this one step only."""

    width: int
    schedule: Schedule
    is_probe: bool = False


class StepControl:
    """One per loop. `schedules`: those that may be chosen, the first one at the start. `adapts_width`: False holds
    `max_width` always. `separate`: the drafter works beside the target."""

    def __init__(
        self,
        max_width: int,
        *,
        adapts_width: bool = False,
        schedules: tuple[Schedule, ...] = ("serial",),
        separate: bool = False,
    ) -> None:
        self.max_width = max_width
        self.widths = width_grid(max_width) if adapts_width else (max_width,)
        self.schedules = schedules
        self.separate = separate
        self.verify_times = StepTimes()
        self.draft_times = StepTimes()
        self.prefill_times = StepTimes()
        self.acceptance = Acceptance(max_width)
        self.num_switches = 0
        self.num_probes = 0
        self._held: tuple[int, Schedule] = (max_width, schedules[0])
        self._now: Prediction | None = None
        self._load: Load | None = None
        self._steps = 0
        self._steps_since_choice = 0
        self._steps_since_probe = 0
        self._probe_budget_s = 0.0
        self._last_run = dict.fromkeys(self.widths, 0)
        self._forced: int | None = None
        self._shown: dict[str, float] = {}

    @property
    def adapts(self) -> bool:
        """Whether there is anything to decide."""
        return len(self.widths) > 1 or len(self.schedules) > 1

    @property
    def learns(self) -> bool:
        """Whether times are of any use: for a choice, or to fill the wait for proposals."""
        return self.adapts or self.separate

    @property
    def width(self) -> int:
        return self._held[0]

    @property
    def schedule(self) -> Schedule:
        return self._held[1]

    # ---- before a step ----------------------------------------------------------------------------------------------

    def decide(self, load: Load) -> Decision:
        """Width and schedule of the next step, from earlier steps and counts alone."""
        if self._forced is not None:
            return Decision(self._forced, "serial")
        if not self.adapts or not load.num_requests:
            return Decision(*self._held)
        self._steps += 1
        self._steps_since_choice += 1
        self._steps_since_probe += 1
        if load != self._load or self._steps_since_choice >= STEPS_BETWEEN_CHOICES:
            self._choose(load)
        decision = self._probe(load) or Decision(*self._held)
        self._last_run[decision.width] = self._steps
        return decision

    def earlier_steps(self) -> EarlierSteps:
        """All that a decision may know, as it stands now."""
        known = survival(self.acceptance.by_slot())
        return EarlierSteps(self.verify_times, self.draft_times, known, separate=self.separate)

    def drafted_widths(self, counts: dict[int, int]) -> dict[int, int]:
        """{needed width: drafted width} for one step (see `planner.shared_widths`); as needed where nothing adapts."""
        if len(counts) < 2 or len(self.widths) == 1 or self._forced is not None:
            return {width: width for width in counts}
        return shared_widths(counts, self.draft_times.lookup)

    def merge(self) -> None:
        """The halves of a split came together by the hold rule: run serially until the planner splits again."""
        if self.schedule == "split":
            self._hold(self.width, "serial")

    def _choose(self, load: Load) -> None:
        self._load = load
        self._steps_since_choice = 0
        best, _ = choose(self.earlier_steps(), load, self.widths, self.schedules, self._held)
        self._now = best
        if best is not None and (best.width, best.schedule) != self._held:
            self._hold(best.width, best.schedule)

    def _hold(self, width: int, schedule: Schedule) -> None:
        self._held = (width, schedule)
        self._steps_since_choice = 0
        self.num_switches += 1

    def _probe(self, load: Load) -> Decision | None:
        """Another width for one step, when what it is expected to cost has been saved up."""
        if self._now is None or len(self.widths) == 1:
            return None
        self._probe_budget_s += PROBE_SHARE * self._now.step_s
        if self._steps_since_probe < STEPS_BETWEEN_PROBES:
            return None
        width = min((one for one in self.widths if one != self.width), key=lambda one: self._last_run[one])
        cost_s = self._probe_cost(load, width)
        if cost_s > self._probe_budget_s:
            return None
        self._probe_budget_s = 0.0
        self._steps_since_probe = 0
        self.num_probes += 1
        return Decision(width, self.schedule, is_probe=True)

    def _probe_cost(self, load: Load, width: int) -> float:
        """Seconds that a step at `width` takes beyond what its tokens take at the width held."""
        assert self._now is not None, "a probe needs a prediction"
        one = predict(self.earlier_steps(), load, width, self.schedule)
        if one is None:
            return self._now.step_s
        return max(0.0, one.step_s - one.tokens / self._now.tokens_per_s)

    # ---- after a step -----------------------------------------------------------------------------------------------

    def verified(self, num_requests: int, rows: int, seconds: float, num_tokens: int, draft_s: float) -> None:
        """A step of `num_requests` decoding requests, no prefill among them, took `seconds` without its drafts, waited `draft_s`
        for them, and committed `num_tokens`."""
        if self.learns:
            self.verify_times.observe(num_requests, rows, seconds)
        if self._forced is None:
            self._show("real_step_s", seconds + draft_s)
            self._show("tokens_per_step", num_tokens)

    def prefilled(self, num_requests: int, rows: int, seconds: float) -> None:
        """A step of prefill chunks alone."""
        if self.learns:
            self.prefill_times.observe(num_requests, rows, seconds)

    def drafted(self, num_requests: int, width: int, seconds: float) -> None:
        """One draft pass for `num_requests` requests at one width."""
        if self.learns:
            self.draft_times.observe(num_requests, num_requests * (width + 1), seconds)

    def decided(self, num_drafts: int, num_accepted: int, count: int = 1) -> None:
        """`count` verified blocks, all alike, that have been committed."""
        if self.adapts and self._forced is None:
            self.acceptance.observe(num_drafts, num_accepted, count)

    def draft_seconds(self, num_requests: int, width: int) -> float | None:
        """Expected time of a draft pass."""
        return self.draft_times.lookup(num_requests, num_requests * (width + 1))

    def prefill_rows_within(self, seconds: float, most: int) -> int:
        """The longest prefill chunk that takes at most `seconds`."""
        times = self.prefill_times if self.prefill_times.measured else self.verify_times
        return times.longest_within(1, seconds, most)

    # ---- warm-up and reports ------------------------------------------------------------------------------------------

    def force(self, width: int | None) -> None:
        """Run at `width` until told otherwise (None: decide again). Times are learned meanwhile, acceptance is not: what is forced
        may be a warm-up on made-up tokens."""
        self._forced = width

    def reset_times(self) -> None:
        """Forget all times."""
        self.verify_times, self.draft_times, self.prefill_times = StepTimes(), StepTimes(), StepTimes()

    def describe(self) -> dict[str, Any]:
        """What is chosen and how well it was predicted; plain values. Times are of one target pass with the wait for its drafts."""
        now = self._now
        passes = 2 if now is not None and now.schedule == "split" else 1
        return {
            "width": self.width,
            "schedule": self.schedule,
            "predicted_step_s": now.step_s / passes if now else None,
            "predicted_tokens_per_s": now.tokens_per_s if now else None,
            "real_step_s": self._shown.get("real_step_s"),
            "tokens_per_step": self._shown.get("tokens_per_step"),
            "num_switches": self.num_switches,
            "num_probes": self.num_probes,
            "acceptance_by_slot": [round(one, 3) for one in self.acceptance.by_slot()],
            "verify_ms_by_rows": self.verify_times.as_dict(),
            "draft_ms_by_rows": self.draft_times.as_dict(),
        }

    def _show(self, name: str, value: float) -> None:
        before = self._shown.get(name, value)
        self._shown[name] = before + _SHOWN_RATE * (value - before)
