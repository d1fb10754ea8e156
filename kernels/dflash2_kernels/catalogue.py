"""The list of operators: what a start-up report, the compile check, the traffic table and the GPU bench go through."""

from collections.abc import Iterator
from types import ModuleType

import torch

from dflash2_kernels import (
    add_rms_norm,
    context_ingest,
    grouped_conv,
    kv_store,
    paged_attention,
    rejection,
    selector_walk,
    vocab_topk,
)
from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.traffic import TrafficCase

# Every module here has OPERATOR, compile_cases() and traffic_cases().
MODULES: tuple[ModuleType, ...] = (
    grouped_conv,
    add_rms_norm,
    vocab_topk,
    selector_walk,
    rejection,
    kv_store,
    paged_attention,
    context_ingest,
)


def report(device: torch.device | str) -> dict[str, str]:
    """The implementation that each operator uses on a device."""
    return {module.OPERATOR.name: module.OPERATOR.implementation(device) for module in MODULES}


def compile_cases() -> Iterator[CompileCase]:
    """Every specialisation that is compiled ahead of time."""
    for module in MODULES:
        yield from module.compile_cases()


def traffic_cases() -> Iterator[TrafficCase]:
    """Every row of the traffic table."""
    for module in MODULES:
        yield from module.traffic_cases()
