"""A real generation before a unit is ready, and what it says of the drafter.

A drafter that belongs to another target loads as well as the right one and costs time at every step: only its acceptance tells.
The text is greedy, so the same unit has the same result each time. It leaves no trace in counters. It must not know text or ray.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.errors import ConfigError, StepFailed
from dflash2_ray.runtime.target_loop import TargetLoop

logger = logging.getLogger(__name__)
NUM_TOKENS = 48


@dataclass(frozen=True)
class StartProbe:
    """acceptance_length: tokens per verify step with drafts, bonus included; None where nothing was drafted."""

    num_tokens: int
    seconds: float
    acceptance_length: float | None


def start_probe(loop: TargetLoop, token_ids: Sequence[int]) -> StartProbe:
    """Generate behind `token_ids`, of which the last ones are taken if the context is short. Raises StepFailed."""
    count = min(NUM_TOKENS, loop.config.max_model_len // 2)
    prompt = tuple(token_ids)[-(loop.config.max_model_len - count) :]
    loop.forget_history()
    loop.control.force(loop.control.max_width)
    started = time.perf_counter()
    loop.add(RequestSpec("start-up-probe", prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)))
    num_tokens = 0
    while loop.has_work:
        for delta in loop.step():
            num_tokens += len(delta.token_ids)
            if delta.finish_reason == "error":
                raise StepFailed(f"the start-up probe failed: {(delta.error or {}).get('message', 'no reason given')}")
    seconds = time.perf_counter() - started
    counted = loop.spec_counters
    length = 1 + counted.num_accepted_tokens / counted.num_drafts if counted.num_drafts else None
    loop.control.force(None)
    loop.forget_history()
    return StartProbe(num_tokens, seconds, length)


def judge(probe: StartProbe, config: ServiceConfig) -> None:
    """Warn of a drafter that is hardly ever accepted, or raise ConfigError where the settings refuse it."""
    if probe.acceptance_length is None or probe.acceptance_length >= config.acceptance_floor:
        return
    message = (
        f"the drafter was accepted for {probe.acceptance_length:.2f} tokens per step in the start-up probe ({probe.num_tokens} tokens), "
        f"expected acceptance_floor={config.acceptance_floor:g} or more; is this the drafter of this target?"
    )
    if config.startup_probe == "refuse":
        raise ConfigError(f"{message} startup_probe=warn starts all the same")
    logger.warning("%s", message)
