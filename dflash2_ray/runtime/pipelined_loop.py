"""The step loop for a drafter that works beside the target: proposals are asked for as soon as their request has committed, and
collected when the target gets to it.

    serial   everybody in one step; the ask goes out at the end of the step before
    split    two halves in turn: while the target verifies one, the drafter drafts the other

Every request still sees draft, verify, commit in order, with its own fresh context, so the tokens are those of `TargetLoop`.
What is asked for one request is bound to its epoch and length; when either has moved on, the ask is forgotten here and its
proposal is dropped by the port. One thread.

What overlaps. With a drafter in another process: drafting with everything this thread does (the other half's verify pass, commits,
scheduling, building batches, new requests), and prefill chunks with waiting for proposals. With a CUDA target also:
this thread's own work up to the first result it reads back, because passes are only enqueued. On a CPU target a pass is
this thread's own work: nothing is built ahead of it, since it would take the same core a moment earlier. With a drafter
in this process (`ColocatedDraftPort`) the loop is correct and nothing overlaps.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash2_ray.core.draft_port import Proposal, Wanted
from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.core.messages import RequestDelta
from dflash2_ray.core.pipeline import balance, draft_time, holds
from dflash2_ray.core.planner import Schedule
from dflash2_ray.core.request import Request
from dflash2_ray.core.scheduler import Planned
from dflash2_ray.core.step_control import StepControl
from dflash2_ray.runtime.target_loop import TargetLoop

failure_log = FailureLog(logging.getLogger(__name__))
_LEAST_GAP_ROWS = 8  # a prefill chunk below this is not worth a pass of its own


@dataclass(slots=True)
class _Asked:
    """What was settled for a request's next step: a proposal on its way, or (width 0) none. `needed_width`: what the step will
    verify; the draft may be wider. `ask`: number of the `ask` call that it went out with."""

    wanted: Wanted
    needed_width: int
    at: float
    ask: int


class PipelinedLoop(TargetLoop):
    """`pipeline`: `split` always, or `auto` as the planner chooses."""

    _asked: dict[str, _Asked]
    _groups: dict[str, int]

    def _build_control(self) -> StepControl:
        self._asked = {}
        self._groups = {}
        self._turn = 0
        self._num_asks = 0
        self._filled_gap = False
        self._separate = self.draft_port is not None and self.config.drafter_placement == "separate"
        schedules: dict[str, tuple[Schedule, ...]] = {
            "serial": ("serial",),
            "split": ("split",),
            "auto": ("serial", "split") if self._separate else ("serial",),
        }
        most = self.config.num_speculative_tokens if self.draft_port else 0
        return StepControl(
            most,
            adapts_width=most > 0 and self.config.draft_width == "auto",
            schedules=schedules[self.config.pipeline],
            separate=self._separate,
        )

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestDelta]:
        """Run one step: a half, everybody, or prefill chunks alone; returns what it brought."""
        self._forget_stale()
        group = self._next_group()
        self._ask(self._decoding(group))
        started = self._clock()
        deltas = self._fill_gap(group, started)
        if deltas is not None:
            return deltas
        planned = self._plan(group)
        if not planned and group is not None:  # this half has nothing to run: the other one, so that no step is idle
            group = 1 - group
            self._ask(self._decoding(group))
            planned = self._plan(group)
        self._filled_gap = False
        self._tell_departures()
        if not planned:
            return []
        if group is not None:
            self._turn = 1 - group
        collecting = self._clock()
        proposals = self._collect(planned)
        return self._finish(planned, proposals, started, self._clock() - collecting)

    def _finish(
        self, planned: Sequence[Planned], proposals: dict[str, Proposal], started: float, draft_s: float
    ) -> list[RequestDelta]:
        """Verify, commit, and ask at once for what these requests need next."""
        deltas = self._verify_and_commit(planned, proposals, started, draft_s)
        self._tell_departures()
        self._forget_stale()
        self._ask([part.request for part in planned])
        return deltas

    def _plan(self, group: int | None) -> list[Planned]:
        widths = {request_id: asked.needed_width for request_id, asked in self._asked.items()}
        prefills = not self._filled_gap  # a gap was just filled with them: the next decode step need not carry them too
        return self.scheduler.plan(
            widths,
            takes=lambda request: self._belongs(request, group) and (prefills or request.decodes),
            admits=prefills,
        )

    # ---- halves -----------------------------------------------------------------------------------------------------

    def _belongs(self, request: Request, group: int | None) -> bool:
        return group is None or self._groups.get(request.request_id, group) == group

    def _decoding(self, group: int | None) -> list[Request]:
        return [one for one in self.scheduler.running if one.decodes and self._belongs(one, group)]

    def _next_group(self) -> int | None:
        """The half whose turn it is; None for everybody (serial, or a half that the hold rule keeps waiting)."""
        if self.control.schedule == "serial":
            self._groups = {}
            return None
        self._groups = balance([one.request_id for one in self.scheduler.running], self._groups)
        if self.config.pipeline == "auto" and self._holds(self._turn):
            self.control.merge()
            self._groups = {}
            return None
        return self._turn

    def _holds(self, group: int) -> bool:
        """The hold rule, where the other half was asked for later than this one."""
        ready, pending = self._decoding(group), self._decoding(1 - group)
        ready_ask = max((self._asked[one.request_id].ask for one in ready if one.request_id in self._asked), default=-1)
        pending_ids = [one.request_id for one in pending if one.request_id in self._asked]
        if not pending_ids or any(self._asked[one].ask <= ready_ask for one in pending_ids):
            return False
        sizes = [(len(half), sum(1 + self._width_of(one) for one in half)) for half in (ready, pending)]
        return holds(self._wait_s(pending_ids, self._clock()), sizes[0], sizes[1], self.control.verify_times.lookup)

    def _width_of(self, request: Request) -> int:
        asked = self._asked.get(request.request_id)
        return asked.needed_width if asked else 0

    # ---- asking ahead -------------------------------------------------------------------------------------------------

    def _ask(self, requests: Iterable[Request]) -> None:
        """Settle the width of everything that decodes and has none settled, one for all of them, and ask for their proposals."""
        fresh = [
            one
            for one in requests
            if one.decodes and one.draftable and self._is_current(one) and one.request_id not in self._asked
        ]
        if self.draft_port is None or not fresh:
            return
        most = self.control.decide(self._load()).width
        # no pages yet: those are held when the step is planned
        parts = [Planned(one, one.epoch, one.num_computed, 1, min(one.draft_width, most), True) for one in fresh]
        wanted = self._wanted(parts)
        if wanted:
            try:
                self.draft_port.ask(list(wanted.values()))
            except Exception:  # a drafter that fails costs speed, never an answer
                failure_log.exception("the drafter failed; %d requests go on as plain decoding", len(wanted))
                self._stop_drafting_all(fresh)
                return
        self._num_asks += 1
        now = self._clock()
        for part in parts:
            request_id = part.request.request_id
            want = wanted.get(request_id)
            if want is not None:
                self._asked[request_id] = _Asked(want, part.width, now, self._num_asks)
            elif part.request.draftable:
                self._asked[request_id] = _Asked(Wanted(request_id, part.epoch, part.start, 0), 0, now, self._num_asks)

    def _collect(self, planned: Sequence[Planned]) -> dict[str, Proposal]:
        """The proposals of a planned step, waiting for those still on their way."""
        popped = [self._asked.pop(part.request.request_id, None) for part in planned]
        asked = [one for one in popped if one is not None and one.needed_width]
        wanted = {one.wanted.request_id: one.wanted for one in asked}
        if self.draft_port is None or not wanted:
            return {}
        started = self._clock()
        try:
            proposed = self.draft_port.collect(list(wanted.values()), self._deadline_s)
        except Exception:
            failure_log.exception("the drafter failed; %d requests go on as plain decoding", len(wanted))
            self._stop_drafting_all([part.request for part in planned])
            return {}
        self._learn_collect(asked, len(proposed), started, self._clock())
        return self._fitting(proposed, wanted, planned)

    def _learn_collect(self, asked: Sequence[_Asked], num_proposed: int, started: float, ended: float) -> None:
        """Tell the control what asks took: the port's own measurements where it has some (`timings`), else what this collect
        tells, if everything came and it was one draft pass."""
        timings = getattr(self.draft_port, "timings", None)
        if timings is not None:
            while timings:
                timing = timings.popleft()
                self.control.drafted(timing.num_requests, timing.width, timing.seconds)
            return
        width = asked[0].wanted.width
        if num_proposed < len(asked) or any((one.ask, one.wanted.width) != (asked[0].ask, width) for one in asked):
            return
        seconds: float | None = ended - started
        if self._separate:
            seconds = draft_time(asked[0].at, started, ended, self.control.draft_seconds(len(asked), width))
        if seconds is not None:
            self.control.drafted(len(asked), width, seconds)

    def _is_current(self, request: Request) -> bool:
        return self.scheduler.get(request.request_id) is request

    def _forget_stale(self) -> None:
        """Drop asks whose request has ended, was preempted or has moved on."""
        for request_id, asked in list(self._asked.items()):
            request = self.scheduler.get(request_id)
            stands = request is not None and request.decodes and request.draftable
            if not stands or (request.epoch, request.num_computed) != (asked.wanted.epoch, asked.wanted.base_len):  # type: ignore[union-attr]
                del self._asked[request_id]

    # ---- gaps -------------------------------------------------------------------------------------------------------

    def _wait_s(self, request_ids: Sequence[str], now: float) -> float:
        """How long until the proposals of these requests are expected; 0 where nothing was asked or nothing is known."""
        asked = [self._asked[one] for one in request_ids if one in self._asked and self._asked[one].needed_width]
        expected = 0.0
        for (ask, width), count in Counter((one.ask, one.wanted.width) for one in asked).items():
            draft_s = self.control.draft_seconds(count, width)
            if draft_s is not None:
                at = max(one.at for one in asked if one.ask == ask)
                expected = max(expected, at + draft_s - now)
        return expected

    def _fill_gap(self, group: int | None, started: float) -> list[RequestDelta] | None:
        """A step of prefill chunks alone, as long as the proposals of `group` are expected to take; None when there is no gap or
        nothing to fill it with."""
        running = self.scheduler.running
        if not self._separate or not (self.scheduler.waiting or any(not one.decodes for one in running)):
            return None
        wait_s = self._wait_s([one.request_id for one in self._decoding(group)], started)
        if wait_s <= 0:
            return None
        num_tokens = self.control.prefill_rows_within(wait_s, self.config.max_num_batched_tokens)
        if num_tokens < _LEAST_GAP_ROWS:
            return None
        planned = self.scheduler.plan(0, takes=lambda request: not request.decodes, num_tokens=num_tokens)
        self._tell_departures()
        if not planned:
            return None
        self._filled_gap = True
        return self._finish(planned, {}, started, 0.0)
