"""A first run through every part before requests come: memory is touched, lazily compiled code is compiled, and the time tables of
the planner are filled, so that the first request is planned as well as the thousandth.

Its requests leave no trace in counters, acceptance or text. It must not know where the times go.
"""

import time
from collections.abc import Callable, Sequence

import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Rows, RowSpan, Wanted
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime.drafter_runner import DrafterRunner
from dflash2_ray.runtime.target_loop import TargetLoop

Progress = Callable[[str, float, float], None]
MEASURE_S = 2.0
_PROMPT_LEN = 32
_NUM_TIMES = 4  # the first one of a size may compile something; `StepTimes` takes the median of three


def warm_up(loop: TargetLoop, progress: Progress | None = None) -> None:
    """Greedy, sampled and seeded requests, alone and together; then the measurement."""
    length = min(8, loop.config.max_model_len - 2)
    room = min(8, loop.config.max_model_len - length)
    kinds: tuple[tuple[float, int | None], ...] = ((0.0, None), (1.0, None), (1.0, 0))  # temperature, seed
    rounds = (*((kind,) for kind in kinds), kinds[: loop.config.max_num_seqs])
    loop.control.force(loop.control.max_width)
    for done, together in enumerate(rounds):
        if progress:
            progress("warm up", done, len(rounds))
        for index, (temperature, seed) in enumerate(together):
            params = SamplingParams(temperature=temperature, max_tokens=room, ignore_eos=True, seed=seed)
            loop.add(RequestSpec(f"warm-up-{done}-{index}", _prompt(loop, length, index), params))
        while loop.has_work:
            loop.step()
    loop.control.force(None)
    if progress:
        progress("warm up", len(rounds), len(rounds))
    measure(loop, progress)


def measure(loop: TargetLoop, progress: Progress | None = None, limit_s: float = MEASURE_S) -> None:
    """Time steps of few and many requests at every width that may be chosen, sizes in turn so that a busy machine disturbs all alike.

    Stops after about `limit_s` seconds, small numbers of requests first. Times that nobody would use are not measured.
    """
    control = loop.control
    if control.learns:
        started = time.perf_counter()
        control.reset_times()  # what the warm-up took is no measure
        counts = _request_counts(loop)
        for done, count in enumerate(counts):
            if progress:
                progress("measure step times", done, len(counts))
            left_s = limit_s - (time.perf_counter() - started)
            if left_s <= 0:
                break
            _measure_count(loop, count, left_s if count == counts[-1] else left_s / 2)
        control.force(None)
        if progress:
            progress("measure step times", len(counts), len(counts))
    loop.forget_history()


def _request_counts(loop: TargetLoop) -> list[int]:
    """1, 4, 16 … and the most that run at once, as far as their pages and one step's tokens go."""
    config = loop.config
    pages_each = -(-(_prompt_len(loop) + _room(loop) + config.num_speculative_tokens) // config.page_size)
    most = max(1, min(config.max_num_seqs, config.num_kv_pages // pages_each))
    counts = [1]
    while counts[-1] * 4 < most:
        counts.append(counts[-1] * 4)
    return counts if most == 1 else [*counts, most]


def _measure_count(loop: TargetLoop, count: int, limit_s: float) -> None:
    """Every width `_NUM_TIMES` times with `count` requests; a round that would not end in time is not begun."""
    started = time.perf_counter()
    ids = _start(loop, count)
    round_s = 0.0
    for _ in range(_NUM_TIMES):
        before = time.perf_counter()
        if before - started + round_s > limit_s and round_s:
            break
        for width in loop.control.widths:
            if len(loop.scheduler.running) < count:  # some came to their end: begin anew
                _stop(loop, ids)
                ids = _start(loop, count)
            loop.control.force(width)
            loop.step()
            if time.perf_counter() - started > limit_s:
                break
        round_s = time.perf_counter() - before
    _stop(loop, ids)


def _start(loop: TargetLoop, count: int) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=_room(loop), ignore_eos=True, seed=0)
    loop.pool.forget_prefixes()  # a prompt that is found again takes no time
    ids = [f"warm-up-{index}" for index in range(count)]
    for index, request_id in enumerate(ids):
        loop.add(RequestSpec(request_id, _prompt(loop, _prompt_len(loop), index), params))
    loop.control.force(0)
    while loop.scheduler.waiting or any(not request.decodes for request in loop.scheduler.running):
        loop.step()
    return ids


def _stop(loop: TargetLoop, ids: Sequence[str]) -> None:
    for request_id in ids:
        loop.abort(request_id)


def _prompt_len(loop: TargetLoop) -> int:
    return max(1, min(_PROMPT_LEN, loop.config.max_model_len // 2))


def _room(loop: TargetLoop) -> int:
    """Tokens that a measured request may emit: enough for every round where the context has room for them."""
    every = _NUM_TIMES * sum(width + 1 for width in loop.control.widths) + 2
    reach = loop.config.max_model_len
    if loop.config.num_speculative_tokens:
        reach = min(reach, loop.config.drafter_max_model_len)
    return max(1, min(every, reach - _prompt_len(loop)))


def _prompt(loop: TargetLoop, length: int, index: int) -> tuple[int, ...]:
    """Tokens all over the vocabulary: equal ones would flatter targets with experts."""
    return tuple((index * 7919 + position * 104729 + 17) % loop.vocab_size for position in range(length))


def warm_up_drafter(runner: DrafterRunner, width: int) -> None:
    """The same for a drafter in a process of its own, before it has a target: a greedy and a sampled draft of `width` tokens."""
    drafter = runner.drafter
    rows = torch.zeros(8, drafter.config.hidden_size, dtype=drafter.activations, device=drafter.device)
    for temperature in (0.0, 1.0):
        name = f"warm-up-{temperature}"
        runner.apply([Open(name, 0, temperature, 0), Rows((RowSpan(name, 0, 0, 8),), rows), Commit(name, 0, 8, 0)])
        runner.propose([Wanted(name, 0, 8, width)])
        runner.apply([Close(name, 0)])
