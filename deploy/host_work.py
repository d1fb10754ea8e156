"""What a step costs besides the models: planning, batching, committing and talking to the drafter, with every device call stubbed.

    python deploy/host_work.py [--requests 64] [--steps 300] [--profile]

The real loop, scheduler, page pool, runner and drafter runner on the embedded pair; target pass, verification and draft pass return at
once with made-up results (three of seven drafts accepted). Prints one line of JSON: medians in ms per step.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
NUM_ACCEPTED = 3


def stub_devices(loop) -> None:
    """Replace what would run on a device."""
    import torch

    from dflash2_ray.models.dflash2 import Draft
    from dflash2_ray.runtime import target_runner
    from dflash2_ray.sampling.rejection import Verdict

    rows = loop.config.max_num_batched_tokens
    drafter = loop.draft_port.runner.drafter
    context = torch.zeros(rows, drafter.config.hidden_size)
    kv = torch.zeros(rows, drafter.config.num_layers, 2, drafter.config.num_kv_heads, drafter.config.head_dim)
    logits = torch.zeros(rows, 1)
    loop.runner.forward = lambda batch: target_runner.TargetPass(logits, context[: len(batch.token_ids)])
    loop.runner.context_rows = lambda result, index: result.features[: None if index is None else len(index)]
    loop.runner.shapers.shape = lambda logits, requests, drafts: (logits, {})
    target_runner.verify = lambda logits, rows: Verdict(
        [min(NUM_ACCEPTED, count) for count in rows.num_drafts], [9] * len(rows.num_drafts)
    )
    drafter.context_kv = lambda rows, positions, num_positions: kv[: rows.shape[0]]
    drafter.draft = lambda anchors, contexts, width, *rest: Draft([[7] * width] * len(anchors), None, None)


def watch_drafter(port) -> list[float]:
    """Seconds spent in the drafter's side of the port, call by call."""
    seconds: list[float] = []

    def timed(call):
        def wrapper(*arguments):
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds.append(time.perf_counter() - started)

        return wrapper

    port.send, port.collect = timed(port.send), timed(port.collect)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    asked = parser.parse_args()

    from dflash2_ray.config import ServiceConfig
    from dflash2_ray.core.messages import RequestSpec
    from dflash2_ray.core.sampling_params import SamplingParams
    from dflash2_ray.core.wire import pack_delta
    from dflash2_ray.runtime.build import build_target_loop

    config = ServiceConfig(
        dtype="float32", draft_width="fixed", max_num_seqs=asked.requests, num_kv_pages=asked.requests * 130, drafter_placement="colocated"
    )
    loop = build_target_loop(config)
    stub_devices(loop)
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    for index in range(asked.requests):
        loop.add(RequestSpec(f"request-{index}", tuple(range(3, 67)), params))
    while any(not request.decodes for request in loop.scheduler.running) or loop.scheduler.waiting:
        loop.step()
    profiler = cProfile.Profile()
    times, drafter_times = [], watch_drafter(loop.draft_port)
    for _ in range(asked.steps):
        drafter_times.clear()
        started = time.perf_counter()
        if asked.profile:
            profiler.enable()
        deltas = loop.step()
        packed = [pack_delta(delta) for delta in deltas]
        if asked.profile:
            profiler.disable()
        times.append(((time.perf_counter() - started) * 1e3, sum(drafter_times) * 1e3))
        assert len(packed) == asked.requests, "every request decodes in every step"
    whole, drafter = (round(statistics.median(column), 3) for column in zip(*times, strict=True))
    print(json.dumps({"requests": asked.requests, "steps": asked.steps, "host_ms_per_step": whole, "of_which_drafter_ms": drafter}))
    if asked.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
