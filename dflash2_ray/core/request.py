"""One client generation inside the engine: its tokens, how far its KV reaches, and how it ends.

The request carries counters, not derived copies. It must not know pages, tensors or the batch it runs in.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash2_ray.core.messages import RequestSpec, SpeculationStats, TokenLogprobs
from dflash2_ray.core.phase_times import PhaseTimes
from dflash2_ray.core.sampling_params import SamplingParams


class RequestState(enum.Enum):
    """Life of a request. Preemption leads from RUNNING back to WAITING, with a higher epoch."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """`token_ids`: prompt and committed output. `num_computed`: positions 0 … num_computed - 1 have their target KV.

    After a step that sampled, `num_computed == len(token_ids) - 1`: the newest token is the anchor, whose KV comes with
    the next step. `epoch` rises with every preemption, so that anything older can be told apart. `prompt_logprobs`: those of the
    prompt's tokens so far (None for the first one), until they are told; None where not asked for. `phases`: kept where the request is traced.

    Of the prefix cache, in tokens. `num_reused_tokens`: how many came out of it when the request was last admitted. `num_cached_tokens`:
    of its prompt, when it was first admitted; None before. `num_context_rows`: the context rows of so many are kept beside the pages.
    `prefix_keys`: of its full pages, as far as they were asked for; they only grow, like the tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    matching: bool
    max_tokens: int
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    num_speculative_tokens: int
    stats: SpeculationStats
    num_resumed_tokens: int = 0
    num_computed: int = 0
    epoch: int = 0
    num_preemptions: int = 0
    state: RequestState = RequestState.WAITING
    draftable: bool = field(default=True)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    phases: PhaseTimes | None = None
    num_reused_tokens: int = 0
    num_cached_tokens: int | None = None
    num_context_rows: int = 0
    prefix_keys: list[bytes] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        spec: RequestSpec,
        *,
        seed: int,
        matching: bool,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        num_speculative_tokens: int,
        phases: PhaseTimes | None = None,
    ) -> "Request":
        """Build the engine's view of an admitted spec. `seed`: 64-bit noise key. `matching`: the text must not depend on
        what is drafted. `max_model_len` bounds the total."""
        params = spec.params
        room = max_model_len - len(spec.prompt_token_ids)
        asked = params.num_speculative_tokens
        width = num_speculative_tokens if asked is None else min(asked, num_speculative_tokens)
        stats = SpeculationStats(num_speculative_tokens)
        if num_speculative_tokens == 0:
            stats.skipped_reason = "drafter_unavailable"
        elif width == 0:
            stats.skipped_reason = "requested"
        return cls(
            request_id=spec.request_id,
            token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
            num_prompt_tokens=len(spec.prompt_token_ids),
            params=params,
            seed=seed,
            matching=matching,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=frozenset() if params.ignore_eos else eos_token_ids,
            num_speculative_tokens=width,
            stats=stats,
            num_resumed_tokens=len(spec.output_token_ids),
            draftable=width > 0,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            phases=phases,
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens + self.num_prompt_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end the output."""
        return self.stop_token_ids | self.eos_token_ids

    def wanted_prompt_positions(self, start: int, num_tokens: int) -> range:
        """Positions among `start … start + num_tokens - 1` whose row tells the log-probability of a prompt token not told yet."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(start + num_tokens, self.num_prompt_tokens - 1))

    @property
    def draft_width(self) -> int:
        """Draft slots that this request can use in its next step, whatever the load."""
        return min(self.num_speculative_tokens, self.num_remaining_tokens) if self.draftable else 0

    @property
    def prefill_goal(self) -> int:
        """Positions that a prefill computes: all of a fresh prompt (its last row samples the first token), but only up to
        the anchor when there is output already, so that the next draft block starts where it always did."""
        return len(self.token_ids) - (1 if self.num_output_tokens else 0)

    @property
    def decodes(self) -> bool:
        """Whether exactly the anchor is left to compute, behind at least one output token."""
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt_tokens and self.num_computed == num_tokens - 1

    def take(self, committed: list[int]) -> tuple[list[int], str | None, int | None]:
        """Append tokens until a stop or the limit, whichever comes first in token order; the limit leaves room for one at least.

        Returns (tokens kept, finish_reason, stop_reason). What lies behind the end is dropped.
        """
        room = self.num_remaining_tokens
        kept = committed[:room]
        if not (self.stop_token_ids.isdisjoint(kept) and self.eos_token_ids.isdisjoint(kept)):
            end, token_id = next(
                (i, one) for i, one in enumerate(kept) if one in self.stop_token_ids or one in self.eos_token_ids
            )
            kept = kept[: end + 1]
            self.token_ids += kept
            return kept, "stop", token_id if token_id in self.stop_token_ids else None
        self.token_ids += kept
        return kept, "length" if len(kept) == room else None, None


def named(requests: Sequence[Request], most: int = 16) -> str:
    """Their ids for a log line, at most so many."""
    ids = [request.request_id for request in requests[:most]]
    return ", ".join(ids) + (f" and {len(requests) - most} more" if len(requests) > most else "")
