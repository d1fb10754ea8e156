"""What one committed step did, added up over its requests in one pass, for everybody who counts. It must not know clocks or counters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash2_ray.core.scheduler import Outcome, Planned


@dataclass(slots=True)
class StepSums:
    """num_rows: of the target's pass, drafts of decoding requests included. num_decided: tokens of decoding requests, before a stop or limit
    cuts. num_prefill_tokens: prompt tokens computed; num_finished_prompts: tokens of prompts that got their first token. blocks: (drafts,
    accepted) of decoding requests with drafts, and how many had just these. asks: drafts were planned for somebody."""

    num_requests: int = 0
    num_decoding: int = 0
    num_rows: int = 0
    num_decided: int = 0
    num_prefill_tokens: int = 0
    num_finished_prompts: int = 0
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    asks: bool = False

    @classmethod
    def of(cls, planned: Sequence[Planned], outcomes: Sequence[Outcome | None]) -> "StepSums":
        """The sums of a step."""
        sums = cls(len(planned))
        blocks = sums.blocks
        for part, outcome in zip(planned, outcomes, strict=True):
            sums.num_rows += part.num_tokens
            if part.width:
                sums.asks = True
            if part.start < part.request.num_prompt_tokens:
                sums.num_prefill_tokens += part.num_tokens
                if outcome is not None:
                    sums.num_finished_prompts += part.request.num_prompt_tokens
            elif outcome is not None:
                sums.num_decoding += 1
                sums.num_decided += outcome.num_accepted + 1
                num_drafts = len(outcome.drafts)
                if num_drafts:
                    sums.num_rows += num_drafts
                    block = num_drafts, outcome.num_accepted
                    blocks[block] = blocks.get(block, 0) + 1
        return sums
