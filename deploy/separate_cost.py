"""What a drafter in a process of its own costs at one request in flight, against one in the target's process.

    python deploy/separate_cost.py [TURNS]

Target and drafter are pinned to cores 0 and 1 (colocated: both on core 0), one compute thread each, the embedded pair, greedy,
full draft width. Both variants run in turns; prints medians of the time per step and their ratio.
"""

import multiprocessing
import os
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
NUM_PROMPTS, NUM_TOKENS = 6, 96


def _drafter(pipe):
    os.sched_setaffinity(0, {1})
    from dflash2_ray.config import ServiceConfig
    from dflash2_ray.runtime.build import build_drafter_runner, draw_blueprint
    from dflash2_ray.runtime.drafter_server import DrafterServer
    from dflash2_ray.runtime.warm_up import warm_up_drafter

    runner = build_drafter_runner(draw_blueprint(ServiceConfig(drafter_placement="separate")))
    warm_up_drafter(runner, 7)
    server = DrafterServer(runner, "separate-cost")
    pipe.send(server.address)
    server.serve()


def _loop(placement, pipeline):
    from dflash2_ray.config import ServiceConfig
    from dflash2_ray.runtime.build import build_target_loop

    return build_target_loop(
        ServiceConfig(
            drafter_placement=placement, draft_width="fixed", pipeline=pipeline, draft_deadline_ms=5000, max_num_seqs=1,
            enable_prefix_caching=False,
        )
    )


def _turn(loop, prompts):
    """Seconds per step, tokens per step, and tokens of one turn."""
    from dflash2_ray.core.messages import RequestSpec
    from dflash2_ray.core.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    steps, spent, tokens = 0, 0.0, []
    for index, prompt in enumerate(prompts):
        loop.add(RequestSpec(f"r{index}", tuple(prompt), params))
        tokens += [token for delta in loop.step() for token in delta.token_ids]  # the prefill is not measured
        started = time.perf_counter()
        while loop.has_work:
            tokens += [token for delta in loop.step() for token in delta.token_ids]
            steps += 1
        spent += time.perf_counter() - started
    return spent / steps, tokens


def main():
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    spawn = multiprocessing.get_context("spawn")
    drafters = []
    for _ in range(2):  # a drafter serves one target at a time; the one that is not in use waits
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=_drafter, args=(theirs,), daemon=True)
        process.start()
        drafters.append((process, mine))
    os.sched_setaffinity(0, {0})
    import torch

    torch.set_num_threads(1)
    from dflash2_ray import LLM

    engine = LLM(max_num_seqs=1)
    prompts = [engine.chat_ids([{"role": "user", "content": f"Tell me a story about {n} birds."}]) for n in range(2, 2 + NUM_PROMPTS)]
    engine.close()
    loops = {"colocated": _loop("colocated", "serial"), "separate, serial": _loop("separate", "serial"),
             "separate, asked ahead": _loop("separate", "auto")}
    for (_, mine), name in zip(drafters, list(loops)[1:], strict=True):
        loops[name].draft_port.connect(mine.recv())
    texts, times = {}, {name: [] for name in loops}
    for turn in range(turns + 1):
        for name, loop in loops.items():
            seconds, texts[name] = _turn(loop, prompts)
            if turn:
                times[name].append(seconds)
    assert len({tuple(text) for text in texts.values()}) == 1, "the placements answered differently"
    for name, some in times.items():
        ratio = statistics.median(one / two for one, two in zip(some, times["colocated"], strict=True))
        print(f"{name}: {statistics.median(some) * 1000:.2f} ms per step, {ratio:.3f} of colocated")
    for process, _ in drafters:
        process.kill()


if __name__ == "__main__":
    main()
