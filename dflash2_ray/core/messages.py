"""What crosses from the front of a unit to its step loop and back: one request in, one delta per step out.

Plain data only, so that every message can be packed for a socket. It must not know how they are carried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash2_ray.core.phase_times import PhaseTimes
from dflash2_ray.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One generation. `output_token_ids` is non-empty when a request goes on after its unit was lost: the tokens that
    its client has already been given; the stream continues behind them. traced: its deltas bring `phases`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    traced: bool = False


@dataclass(slots=True)
class SpeculationStats:
    """How speculation went for one request, counted on tokens that the client got.

    `histogram[i]`: verify steps that committed `i + 1` tokens (so the step's last token counts as the bonus, and a step
    cut by a stop or a limit counts what it delivered). Tokens of all steps + 1 (prefill) = completion tokens, as long as
    every step was a verify step; `num_plain_steps` counts the others, `skipped_steps` the same by reason.
    `skipped_reason`: why this request does not speculate (any more).
    """

    num_speculative_tokens: int
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_plain_steps: int = 0
    skipped_reason: str | None = None
    skipped_steps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.histogram:
            self.histogram = [0] * (self.num_speculative_tokens + 1)

    def record(self, num_drafts: int, num_committed: int, reason: str | None = None) -> None:
        """Count one step of `num_drafts` drafts that delivered `num_committed` tokens (1 … num_drafts + 1); `reason`: why there
        were none."""
        if num_drafts == 0:
            self.num_plain_steps += 1
            if reason is not None:
                self.skipped_steps[reason] = self.skipped_steps.get(reason, 0) + 1
            return
        self.num_draft_tokens += num_drafts
        self.histogram[num_committed - 1] += 1

    @property
    def num_spec_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(index * count for index, count in enumerate(self.histogram))

    @property
    def accepted_per_position(self) -> list[int]:
        """Steps that accepted more than so many drafts, by that number."""
        return [sum(self.histogram[position + 1 :]) for position in range(self.num_speculative_tokens)]

    def as_dict(self) -> dict[str, Any]:
        """The `metrics.speculative_decoding` object of a response (keys of vLLM, and three of ours)."""
        steps, accepted = self.num_spec_steps, self.num_accepted_draft_tokens
        return {
            "enabled": self.skipped_reason is None,
            "skipped_reason": self.skipped_reason,
            "skipped_steps": dict(self.skipped_steps),
            "num_spec_tokens": self.num_speculative_tokens,
            "num_spec_steps": steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": accepted,
            "emitted_accepted_tokens": accepted,
            "num_plain_steps": self.num_plain_steps,
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
            "draft_acceptance_rate": accepted / self.num_draft_tokens if self.num_draft_tokens else None,
            "acceptance_histogram": list(self.histogram),
            "accepted_per_position": self.accepted_per_position,
        }


Alternatives = tuple[tuple[int, float], ...]
TokenLogprobs = tuple[float, Alternatives]
"""Log-probability of a token, and (token id, log-probability) of the most likely ones, best first (lower id first among equals)."""

StepCount = tuple[int, int, str | None]
"""One decode step: (drafts verified, tokens delivered, why there were no drafts)."""


def cut_steps(steps: Sequence[StepCount], num_tokens: int) -> tuple[StepCount, ...]:
    """The steps without their last `num_tokens` tokens."""
    kept = list(steps)
    while num_tokens > 0 and kept:
        num_drafts, committed, reason = kept.pop()
        if committed > num_tokens:
            kept.append((num_drafts, committed - num_tokens, reason))
        num_tokens -= committed
    return tuple(kept)


@dataclass(slots=True)
class RequestDelta:
    """What one step (or several, merged) brought to one request: its new tokens, and how it ended if it did.

    finish_reason: None while running, `stop` or `length` at the end, `error` when the engine failed on it (`error`: the packed
    error). stop_reason: the stop token id that ended it, None for end-of-text and limits. steps: one entry per decode step; the
    step that ended the prefill has none. logprobs: one entry per token where asked for. prompt_logprobs: one per prompt token
    (None for the first), with the first delta, where asked for. num_speculative_tokens: draft slots that the engine is
    configured for. skipped_reason: why this request does not speculate (any more). num_cached_tokens: with the first tokens, how many of the
    prompt came out of the prefix cache. stats: with the last delta. phases: of a traced request, where
    its time went so far.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    steps: tuple[StepCount, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_speculative_tokens: int = 0
    num_cached_tokens: int = 0
    skipped_reason: str | None = None
    error: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None
    phases: PhaseTimes | None = None
