"""Where one request's time goes in the engine, added up over its steps. Kept only for requests that are traced.

A step's time counts for every request in it. It must not know spans, nor read a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class PhaseTimes:
    """Seconds. queue_s: from `queued_at` to the first step; prefill_s: steps before the first token, and those that compute it all again;
    draft_s, transfer_s: what decode steps waited for drafts, and how much of that the drafter did not compute but its messages travelled;
    verify_s: the rest of the decode steps. num_draft_steps: decode steps with drafts of this request."""

    queued_at: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    num_prefill_steps: int = 0
    num_draft_steps: int = 0
    num_decode_steps: int = 0

    def record(
        self, started: float, draft_s: float, transfer_s: float, verify_s: float, *, decodes: bool, drafted: bool
    ) -> None:
        """One step that began at `started`, on the clock of `queued_at`; draft_s without transfer_s."""
        if not self.num_prefill_steps and not self.num_decode_steps:
            self.queue_s = started - self.queued_at
        if not decodes:
            self.num_prefill_steps += 1
            self.prefill_s += draft_s + transfer_s + verify_s
            return
        self.num_decode_steps += 1
        self.num_draft_steps += drafted
        self.draft_s += draft_s
        self.transfer_s += transfer_s
        self.verify_s += verify_s

    def pack(self) -> list[float]:
        """Plain values, without `queued_at`: another process has another clock."""
        return [
            self.queue_s,
            self.prefill_s,
            self.draft_s,
            self.transfer_s,
            self.verify_s,
            self.num_prefill_steps,
            self.num_draft_steps,
            self.num_decode_steps,
        ]

    @classmethod
    def unpack(cls, values: Sequence[float]) -> "PhaseTimes":
        """The times again."""
        queue_s, prefill_s, draft_s, transfer_s, verify_s, *counts = values
        return cls(0.0, queue_s, prefill_s, draft_s, transfer_s, verify_s, *map(int, counts))
