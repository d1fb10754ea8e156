"""A first run through every part before requests come: memory is touched, tables are built, lazily compiled code is compiled."""

from collections.abc import Callable

from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime.target_loop import TargetLoop

Progress = Callable[[str, float, float], None]


def warm_up(loop: TargetLoop, progress: Progress | None = None) -> None:
    """Greedy, sampled and seeded requests, alone and together."""
    length = min(8, loop.config.max_model_len - 2)
    room = min(8, loop.config.max_model_len - length)
    prompt = tuple(index % loop.vocab_size for index in range(length))
    kinds: tuple[tuple[float, int | None], ...] = ((0.0, None), (1.0, None), (1.0, 0))  # temperature, seed
    rounds = (*((kind,) for kind in kinds), kinds[: loop.config.max_num_seqs])
    for done, together in enumerate(rounds):
        if progress:
            progress("warm up", done, len(rounds))
        for index, (temperature, seed) in enumerate(together):
            params = SamplingParams(temperature=temperature, max_tokens=room, ignore_eos=True, seed=seed)
            loop.add(RequestSpec(f"warm-up-{done}-{index}", prompt, params))
        while loop.has_work:
            loop.step()
    if progress:
        progress("warm up", len(rounds), len(rounds))
