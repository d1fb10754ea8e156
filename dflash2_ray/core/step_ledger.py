"""What the step loop counts: steps, tokens, and how long each request waited and ran. Called once per step, not per token."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash2_ray.core.ledger import Ledger, Numbers
from dflash2_ray.core.messages import RequestDelta
from dflash2_ray.core.scheduler import Planned
from dflash2_ray.core.step_sums import StepSums


@dataclass(slots=True)
class _Times:
    """Of one request, on the loop's clock, in seconds."""

    queued: float
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0


class StepLedger:
    """Times come from the caller."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._times: dict[str, _Times] = {}
        self._waiting: set[str] = set()  # those that no step has had yet

    def numbers(self) -> Numbers:
        """As they stand; any thread may ask."""
        return self._ledger.copy()

    def queued(self, request_id: str, now: float) -> None:
        """A request came."""
        self._times[request_id] = _Times(now)
        self._waiting.add(request_id)

    def step(
        self, planned: Sequence[Planned], sums: StepSums, deltas: Sequence[RequestDelta], started: float, ended: float, draft_s: float
    ) -> None:  # fmt: skip
        """A step that ran from `started` to `ended` and waited `draft_s` of it for drafts."""
        ledger = self._ledger
        if self._waiting:
            self._start(planned, started)
        num_tokens = 0
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            for num_drafts, _, reason in delta.steps:
                if not num_drafts and reason is not None:
                    ledger.add(f"spec_skipped/{reason}")
            times = self._times.get(delta.request_id)
            if times is not None and delta.token_ids:
                times.last_token = ended
                if times.first_token is None:
                    times.first_token = ended
            if delta.finish_reason is not None:
                self.ended(delta.request_id)
        ledger.add("prompt_tokens", sums.num_finished_prompts)
        ledger.add("generation_tokens", num_tokens)
        ledger.observe("iteration_tokens", num_tokens + sums.num_prefill_tokens)
        ledger.observe("verify_s", ended - started - draft_s)
        if sums.asks:
            ledger.observe("draft_wait_s", draft_s)
        if sums.blocks:
            ledger.add("num_verify_passes")

    def _start(self, planned: Sequence[Planned], started: float) -> None:
        """Note whose first step this was."""
        for part in planned:
            request_id = part.request.request_id
            if request_id in self._waiting:
                self._waiting.discard(request_id)
                self._times[request_id].started = started

    def ended(self, request_id: str) -> None:
        """A request is over, at its end or cancelled; unknown ids are ignored."""
        self._waiting.discard(request_id)
        times = self._times.pop(request_id, None)
        if times is None or times.started is None:
            return
        self._ledger.observe("queue_s", times.started - times.queued)
        if times.first_token is not None:
            self._ledger.observe("prefill_s", times.first_token - times.started)
            self._ledger.observe("decode_s", times.last_token - times.first_token)
            self._ledger.observe("inference_s", times.last_token - times.started)
