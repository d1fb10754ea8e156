"""Part: the engine at real shape on random weights: tokens/s plain against speculative by concurrency, where a step's time goes, and
what a step takes without CUDA graphs.

A drafter of random weights is hardly ever accepted, so the measured speculative rate is the worst case; `tokens_per_s_if` says what the
measured step would give at an acceptance length that trained drafters reach (modelled, no more than a product).
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loops import add, has_graphs, launch_by_launch, prompts, running_loop, step
from part_script import PartScript
from random_checkpoints import drawn_weights, make_pair
from sizes import Sizes, sizes

from dflash2_ray.runtime.target_loop import TargetLoop

_IF_ACCEPTED = 4.0
_SPLIT_STEPS = 8
_PHASES = ("draft", "forward", "verify", "context")


def main() -> None:
    part = PartScript()
    size = sizes(part.rehearsal)
    result: dict[str, Any] = {"status": "failed", "concurrency": [], "cut": [], "graphs": {}}
    with tempfile.TemporaryDirectory(prefix="dflash2-gpu-") as folder, drawn_weights(part.device):
        target, drafter = make_pair(Path(folder), size)
        keys = {
            "target": target, "drafter": drafter, "dtype": "bfloat16", "device": part.device, "max_model_len": size.max_model_len,
            "max_num_seqs": max(size.batches), "seed": 0, "generation_config": "none",
        }  # fmt: skip
        started = time.perf_counter()
        with running_loop(keys) as loop:
            result["load_s"] = round(time.perf_counter() - started, 2)
            result["operators"] = loop.describe()["operators"]
            result["num_fused_layers"] = loop.runner.target.num_fused_layers
            part.write(result)
            _measure(loop, 1, size, 0, part)  # compiles what a step needs
            _measure(loop, 1, size, loop.control.max_width, part)
            for count in size.batches:
                if part.left_s < 10:
                    result["cut"].append(f"concurrency {count}")
                    continue
                result["concurrency"].append(_row(loop, count, size, part))
                result["graphs"] = loop.describe()["cuda_graphs"]
                part.write(result)
    refused = any(one["failure"] for one in result["graphs"].values())
    result["status"] = "passed" if result["concurrency"] and not refused else "failed"
    part.write(result)


def _row(loop: TargetLoop, count: int, size: Sizes, part: PartScript) -> dict[str, Any]:
    plain = _measure(loop, count, size, 0, part)
    drafted = _measure(loop, count, size, loop.control.max_width, part)
    drafted["tokens_per_s_if"] = {
        "acceptance_length": _IF_ACCEPTED,
        "tokens_per_s": count * _IF_ACCEPTED / drafted["step_ms"] * 1e3,
    }
    return {
        "requests": count,
        "plain": plain,
        "speculative": drafted,
        "launch_by_launch": _ungraphed(loop, count, size, part),
    }


def _ungraphed(loop: TargetLoop, count: int, size: Sizes, part: PartScript) -> dict[str, float] | None:
    """Milliseconds of a step without graphs; None where there are none, or no time."""
    if not has_graphs(loop) or part.left_s < 10:
        return None
    with launch_by_launch(loop):
        widths = {"plain": 0, "speculative": loop.control.max_width}
        return {
            f"{kind}_step_ms": _measure(loop, count, size, width, part)["step_ms"] for kind, width in widths.items()
        }


def _measure(loop: TargetLoop, count: int, size: Sizes, width: int, part: PartScript) -> dict[str, Any]:
    """Decode steps of `count` requests: prompts are taken in first, and the last steps, with fewer requests, are left out."""
    names = [f"request-{index}" for index in range(count)]
    for name, prompt in zip(names, prompts(count, size.prompt_len, size.vocab), strict=True):
        add(loop, name, prompt, size.new_tokens, temperature=0.0)
    loop.control.force(0)
    while loop.scheduler.waiting or any(not request.decodes for request in loop.scheduler.running):
        step(loop)
    loop.control.force(width)
    loop.forget_history()
    step(loop)  # the drafter's contexts begin here
    _wait(part)
    started, tokens, steps = time.perf_counter(), 0, 0
    half = size.new_tokens // 2
    while len(loop.scheduler.running) == count and tokens < count * half and part.left_s > 5:
        tokens += sum(len(delta.token_ids) for delta in step(loop))
        steps += 1
    _wait(part)
    seconds = time.perf_counter() - started
    split = _split(loop, count, part) if len(loop.scheduler.running) == count else dict.fromkeys(_PHASES)
    acceptance = loop.spec_counters.acceptance_length
    for name in names:
        loop.abort(name)
    return {
        "tokens_per_s": tokens / seconds, "step_ms": seconds / max(1, steps) * 1e3, "num_steps": steps, "acceptance_length": acceptance,
        "split_ms": split,
    }  # fmt: skip


def _split(loop: TargetLoop, count: int, part: PartScript) -> dict[str, float | None]:
    """Milliseconds of a step by phase. The device is waited for around each, so their sum exceeds an undisturbed step."""
    spent = dict.fromkeys(_PHASES, 0.0)
    homes = {
        "draft": (loop, "_draft"),
        "forward": (loop.runner, "forward"),
        "verify": (loop.runner, "verify"),
        "context": (loop, "_commit_context"),
    }
    for phase, (owner, name) in homes.items():
        setattr(owner, name, _timed(getattr(owner, name), phase, spent, part))
    steps, most = 0, 1 if part.rehearsal else _SPLIT_STEPS
    try:
        while steps < most and len(loop.scheduler.running) == count:
            step(loop)
            steps += 1
    finally:
        for owner, name in homes.values():
            delattr(owner, name)  # the class's own shows again
    return {phase: seconds / max(1, steps) * 1e3 for phase, seconds in spent.items()}


def _timed(call: Callable[..., Any], phase: str, spent: dict[str, float], part: PartScript) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        _wait(part)
        started = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            _wait(part)
            spent[phase] += time.perf_counter() - started

    return run


def _wait(part: PartScript) -> None:
    if not part.rehearsal:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
