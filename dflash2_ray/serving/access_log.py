"""One line per answered request: what it was and what it took, without a word of the user's.

Serve's own access line has method, route, status and latency of every call; this one has the tokens.
"""

import logging
from collections.abc import Sequence
from typing import Any

from dflash2_ray.core.generation import Generation

logger = logging.getLogger("ray.serve")


def log_answer(request_id: str, generations: Sequence[Generation], *, chat: bool, streamed: bool) -> None:
    """`generations`: one per choice. Counts are sums, times those of the choice that took longest. Silent where Serve's
    `enable_access_log` is off."""
    timing = [one.metrics["timing"] for one in generations]
    speculation = [one.metrics["speculative_decoding"] for one in generations]
    steps = sum(one["num_spec_steps"] for one in speculation)
    fields: dict[str, Any] = {
        "request_id": request_id,
        "operation": "chat" if chat else "completion",
        "streamed": streamed,
        "num_choices": len(generations),
        "num_prompt_tokens": sum(one.usage.prompt_tokens for one in generations),
        "num_completion_tokens": sum(one.usage.completion_tokens for one in generations),
        "finish_reasons": sorted({one.finish_reason for one in generations}),
        "time_to_first_token_s": round(max(one["time_to_first_token_s"] for one in timing), 4),
        "end_to_end_s": round(max(one["end_to_end_s"] for one in timing), 4),
        "acceptance_length": round(1 + sum(one["num_accepted_draft_tokens"] for one in speculation) / steps, 2)
        if steps
        else None,
        "skipped_reason": speculation[0]["skipped_reason"],
        "num_resumes": sum(one.metrics.get("num_resumes", 0) for one in generations),
    }
    logger.info(
        "request %(request_id)s answered: %(operation)s, %(num_prompt_tokens)d prompt and %(num_completion_tokens)d completion tokens, "
        "first after %(time_to_first_token_s).3f s, all after %(end_to_end_s).3f s, acceptance length %(acceptance_length)s",
        fields,
        extra={**fields, "serve_access_log": True},
    )
