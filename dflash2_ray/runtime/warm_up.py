"""A first run through every part before requests come: memory is touched, tables are built, lazily compiled code is compiled."""

from collections.abc import Callable

import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Rows, RowSpan, Wanted
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime.drafter_runner import DrafterRunner
from dflash2_ray.runtime.target_loop import TargetLoop

Progress = Callable[[str, float, float], None]


def warm_up(loop: TargetLoop, progress: Progress | None = None) -> None:
    """One greedy and one sampled request, alone and together."""
    length = min(8, loop.config.max_model_len - 2)
    room = min(8, loop.config.max_model_len - length)
    prompt = tuple(index % loop.vocab_size for index in range(length))
    rounds = ((0.0,), (1.0,), (0.0, 1.0)[: loop.config.max_num_seqs])
    for done, temperatures in enumerate(rounds):
        if progress:
            progress("warm up", done, len(rounds))
        for index, temperature in enumerate(temperatures):
            params = SamplingParams(temperature=temperature, max_tokens=room, ignore_eos=True, seed=0)
            loop.add(RequestSpec(f"warm-up-{done}-{index}", prompt, params))
        while loop.has_work:
            loop.step()
    if progress:
        progress("warm up", len(rounds), len(rounds))


def warm_up_drafter(runner: DrafterRunner, width: int) -> None:
    """The same for a drafter in a process of its own, before it has a target: a greedy and a sampled draft of `width` tokens."""
    drafter = runner.drafter
    rows = torch.zeros(8, drafter.config.hidden_size, dtype=drafter.activations, device=drafter.device)
    for temperature in (0.0, 1.0):
        name = f"warm-up-{temperature}"
        runner.apply([Open(name, 0, temperature, 0), Rows((RowSpan(name, 0, 0, 8),), rows), Commit(name, 0, 8, 0)])
        runner.propose([Wanted(name, 0, 8, width)])
        runner.apply([Close(name, 0)])
