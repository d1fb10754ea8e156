"""What crosses from the front of a unit to its step loop and back: one request in, one delta per step out.

Plain data only, so that every message can be packed for a socket. It must not know how they are carried.
"""

from dataclasses import dataclass, field
from typing import Any

from dflash2_ray.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One generation. `output_token_ids` is non-empty when a request goes on after its unit was lost: the tokens that
    its client has already been given; the stream continues behind them."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class SpeculationStats:
    """How speculation went for one request, counted on tokens that the client got.

    `histogram[i]`: verify steps that committed `i + 1` tokens (so the step's last token counts as the bonus, and a step
    cut by a stop or a limit counts what it delivered). Tokens of all steps + 1 (prefill) = completion tokens, as long as
    every step was a verify step; `num_plain_steps` counts the others.
    """

    num_speculative_tokens: int
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_plain_steps: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    skipped_reason: str | None = None

    def __post_init__(self) -> None:
        if not self.histogram:
            self.histogram = [0] * (self.num_speculative_tokens + 1)
        if not self.accepted_per_position:
            self.accepted_per_position = [0] * self.num_speculative_tokens

    def record(self, num_drafts: int, num_committed: int) -> None:
        """Count one verify step of `num_drafts` drafts that delivered `num_committed` tokens (1 … num_drafts + 1)."""
        if num_drafts == 0:
            self.num_plain_steps += 1
            return
        self.num_draft_tokens += num_drafts
        self.histogram[num_committed - 1] += 1
        for position in range(num_committed - 1):
            self.accepted_per_position[position] += 1

    @property
    def num_spec_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(index * count for index, count in enumerate(self.histogram))

    def as_dict(self) -> dict[str, Any]:
        """The `metrics.speculative_decoding` object of a response (keys of vLLM, and three of ours)."""
        steps, accepted = self.num_spec_steps, self.num_accepted_draft_tokens
        return {
            "enabled": self.skipped_reason is None,
            "skipped_reason": self.skipped_reason,
            "num_spec_tokens": self.num_speculative_tokens,
            "num_spec_steps": steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": accepted,
            "emitted_accepted_tokens": accepted,
            "num_plain_steps": self.num_plain_steps,
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
            "draft_acceptance_rate": accepted / self.num_draft_tokens if self.num_draft_tokens else None,
            "acceptance_histogram": list(self.histogram),
            "accepted_per_position": list(self.accepted_per_position),
        }


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step brought to one request: its new tokens, and how it ended if it did.

    `finish_reason`: None while running, `stop` or `length` at the end, `error` when the engine failed on it.
    `stop_reason`: the stop token id that ended it, None for end-of-text and limits. `stats` comes with the last delta;
    `cached_tokens` is the number of prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    stats: dict[str, Any] | None = None
    error: str | None = None
