"""What a drafter in a process of its own costs, against one in the target's process.

    python deploy/separate_cost.py [TURNS] [--concurrency 1] [--prompts 6] [--tokens 96] [--pipelines serial,auto]

Target and drafter are pinned to two cores (colocated: both on the first), one compute thread each, the embedded pair, greedy,
full draft width. All variants run in turns: `colocated`, and the drafter separate under each of the pipelines (`serial`: asked when a
step begins; `auto`: asked ahead, and split where the planner says so; `split`). Prefills are not measured. Prints medians of the time
per step and of the time per token, the latter also as the paired ratio to colocated.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field

os.environ["OMP_NUM_THREADS"] = "1"
CORES = sorted(os.sched_getaffinity(0))


@dataclass
class Times:
    """Of one variant, a number per turn."""

    step_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)


def _drafter(pipe, concurrency):
    os.sched_setaffinity(0, {CORES[-1]})
    from dflash2_ray.config import ServiceConfig
    from dflash2_ray.runtime.build import build_drafter_runner, draw_blueprint
    from dflash2_ray.runtime.drafter_server import DrafterServer
    from dflash2_ray.runtime.warm_up import warm_up_drafter

    runner = build_drafter_runner(draw_blueprint(ServiceConfig(drafter_placement="separate", max_num_seqs=concurrency)))
    warm_up_drafter(runner, 7)
    server = DrafterServer(runner, "separate-cost")
    pipe.send(server.address)
    server.serve()


def _loop(placement, pipeline, concurrency):
    from dflash2_ray.config import ServiceConfig
    from dflash2_ray.runtime.build import build_target_loop

    return build_target_loop(
        ServiceConfig(
            drafter_placement=placement,
            draft_width="fixed",
            pipeline=pipeline,
            draft_deadline_ms=5000,
            max_num_seqs=concurrency,
            enable_prefix_caching=False,
        )
    )


def _turn(loop, prompts, concurrency, num_tokens):
    """(seconds per step, seconds per token, tokens by request) of one turn: `concurrency` requests at once, then the next."""
    from dflash2_ray.core.messages import RequestSpec
    from dflash2_ray.core.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    num_steps, spent, num_measured, tokens = 0, 0.0, 0, {}

    def step():
        count = 0
        for delta in loop.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            count += len(delta.token_ids)
        return count

    for first in range(0, len(prompts), concurrency):
        for index, prompt in enumerate(prompts[first : first + concurrency], first):
            loop.add(RequestSpec(f"r{index}", tuple(prompt), params))
        while loop.scheduler.waiting or any(not request.decodes for request in loop.scheduler.running):
            step()
        started = time.perf_counter()
        while loop.has_work:
            num_measured += step()
            num_steps += 1
        spent += time.perf_counter() - started
    return spent / num_steps, spent / num_measured, tokens


def measure(turns, concurrency, num_prompts, num_tokens, pipelines):
    """{variant: its times}. Raises AssertionError when two variants answer differently."""
    spawn = multiprocessing.get_context("spawn")
    drafters = []
    for _ in pipelines:  # a drafter serves one target at a time; those that are not in use wait
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=_drafter, args=(theirs, concurrency), daemon=True)
        process.start()
        drafters.append((process, mine))
    os.sched_setaffinity(0, {CORES[0]})
    import torch

    torch.set_num_threads(1)
    from dflash2_ray.models.source import locate
    from dflash2_ray.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(locate("embedded"))
    prompts = [tokenizer.encode(f"Tell me a story about {count} birds.") for count in range(2, 2 + num_prompts)]
    loops = {"colocated": _loop("colocated", "serial", concurrency)}
    for pipeline, (_, mine) in zip(pipelines, drafters, strict=True):
        loop = loops[f"separate, {pipeline}"] = _loop("separate", pipeline, concurrency)
        loop.draft_port.connect(mine.recv())
    times, texts = {name: Times() for name in loops}, {}
    for turn in range(turns + 1):
        for name, loop in loops.items():
            step_s, token_s, texts[name] = _turn(loop, prompts, concurrency, num_tokens)
            if turn:
                times[name].step_s.append(step_s)
                times[name].token_s.append(token_s)
    assert all(text == texts["colocated"] for text in texts.values()), "the placements answered differently"
    for loop in loops.values():
        loop.close()
    for process, _ in drafters:
        process.kill()
        process.join()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("turns", nargs="?", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pipelines", type=lambda text: text.split(","), default=["serial", "auto"])
    args = parser.parse_args()
    times = measure(args.turns, args.concurrency, args.prompts, args.tokens, args.pipelines)
    for name, one in times.items():
        ratio = statistics.median(
            mine / theirs for mine, theirs in zip(one.token_s, times["colocated"].token_s, strict=True)
        )
        step_ms, token_ms = statistics.median(one.step_s) * 1000, statistics.median(one.token_s) * 1000
        print(f"{name}: {step_ms:.2f} ms per step, {token_ms:.3f} ms per token, {ratio:.3f} of colocated")


if __name__ == "__main__":
    main()
