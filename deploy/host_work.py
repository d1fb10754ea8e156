"""What a step costs besides the models: planning, batching, verifying, committing and talking to the drafter, on one CPU thread.

    python deploy/host_work.py [--requests 64] [--steps 300] [--profile]

The real loop, scheduler, page pool, runners and draft port on the embedded pair, for greedy requests. Stubbed, and so not counted: the
target's pass; the drafter's pass up to its candidates' scores, and its keys and values of committed rows; what they return is made up, and
three of seven drafts stand. Everything around them is real and counted: argmax and walk on a few columns, reading their results, the page
tables that the attention kernels want, packing the deltas for the front. Context rows and the drafter's keys and values are one number
wide, so that a copy of them counts as the call that it is, not as memory traffic.
Prints one line of JSON, medians in ms of this thread's CPU time per step: the whole, what of it the colocated drafter's side takes, and the
parts, each without what it calls of another (`rest`: what no part covers).
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")
NUM_ACCEPTED = 3
DRAFTER_PARTS = ("drafter_commit", "drafter_propose")


def stub_devices(loop) -> None:
    """Replace what would run on a device. The target decides 1 everywhere; the drafter drafts 1 for `NUM_ACCEPTED` slots, then 0."""
    import torch

    from dflash2_ray.models.draft_context import DraftContext
    from dflash2_ray.models.paged_plan import plan_pages
    from dflash2_ray.runtime.target_runner import TargetPass

    drafter = loop.draft_port.runner.drafter
    width, candidates = loop.config.num_speculative_tokens, drafter.num_candidates
    num_rows = max(loop.config.max_num_seqs * (width + 1), loop.config.max_num_batched_tokens)
    narrow = torch.zeros(num_rows, 1)
    kv = torch.zeros(num_rows, drafter.config.num_layers, 2, 1, 1)
    windows = [layer.window for layer in drafter.config.attention]
    logits = torch.tensor([0.0, 1.0]).expand(num_rows, 2).contiguous()
    hidden = torch.zeros(loop.config.max_num_seqs, width, 1)
    unary = torch.zeros(loop.config.max_num_seqs, width, candidates)
    scores = unary[:, :, None].expand(-1, -1, candidates, -1).contiguous()
    ids = torch.zeros(unary.shape, dtype=torch.int64)
    ids[:, :NUM_ACCEPTED] = 1

    def forward(batch):
        plan_pages(batch.attention)
        return TargetPass(logits[: batch.num_logit_rows], narrow[: len(batch.token_ids)])

    loop.runner.forward = forward
    loop.runner.projection = lambda rows: rows
    drafter.new_context = lambda first=0: DraftContext(windows, 1, 1, narrow, first)
    drafter.context_kv = lambda rows, positions, num_positions: kv[: len(rows)]
    drafter.block_hidden = lambda anchors, contexts, slots: hidden[: len(anchors), :slots]
    drafter.candidates = lambda rows: (unary[: len(rows), : rows.shape[1]], ids[: len(rows), : rows.shape[1]])
    drafter.candidate_selector.lattice = lambda rows, unary, ids, anchors: scores[: len(rows), : rows.shape[1]]


class Parts:
    """Seconds by part of a step, each without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def watch(self, owner, method: str, part: str) -> None:
        """Count the calls of `owner.method` as `part`."""
        call = getattr(owner, method)

        def watched(*arguments):
            started = time.thread_time()
            self._inside.append(0.0)
            try:
                return call(*arguments)
            finally:
                took = time.thread_time() - started
                self.seconds[part] += took - self._inside.pop()
                self._inside[-1] += took

        setattr(owner, method, watched)


def watch_parts(loop) -> Parts:
    """The parts of a step of `loop`."""
    from dflash2_ray.runtime import target_loop

    parts = Parts()
    for owner, method, part in (
        (loop.scheduler, "plan", "plan"),
        (loop, "_draft", "draft"),
        (loop.draft_port, "collect", "drafter_propose"),
        (target_loop, "build_input_batch", "batch"),
        (loop.runner, "forward", "page_tables"),
        (loop.runner, "verify", "verify"),
        (loop.scheduler, "commit", "commit"),
        (loop, "_commit_context", "context"),
        (loop.draft_port, "send", "drafter_commit"),
        (loop, "_learn_step", "learn"),
    ):
        parts.watch(owner, method, part)
    return parts


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
        dtype="float32",
        draft_width="fixed",
        max_num_seqs=asked.requests,
        num_kv_pages=asked.requests * 130,
        drafter_placement="colocated",
    )
    loop = build_target_loop(config)
    stub_devices(loop)
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    for index in range(asked.requests):
        loop.add(RequestSpec(f"request-{index}", tuple(range(3 + index, 67 + index)), params))
    while any(not request.decodes for request in loop.scheduler.running) or loop.scheduler.waiting:
        loop.step()
    parts = watch_parts(loop)
    profiler = cProfile.Profile()
    steps: list[dict[str, float]] = []
    for _ in range(asked.steps):
        parts.seconds.clear()
        started = time.thread_time()
        if asked.profile:
            profiler.enable()
        deltas = loop.step()
        packing = time.thread_time()
        packed = [pack_delta(delta) for delta in deltas]
        if asked.profile:
            profiler.disable()
        ended = time.thread_time()
        whole, parts.seconds["pack"] = ended - started, ended - packing
        rest = whole - sum(parts.seconds.values())
        steps.append(
            {
                "host": whole,
                "drafter": sum(parts.seconds[part] for part in DRAFTER_PARTS),
                **parts.seconds,
                "rest": rest,
            }
        )
        assert [len(delta["token_ids"]) for delta in packed] == [NUM_ACCEPTED + 1] * asked.requests, (
            "every request decodes in every step"
        )
    medians = {part: round(statistics.median(step[part] for step in steps) * 1e3, 3) for part in steps[0]}
    told = {"requests": asked.requests, "steps": asked.steps}
    told |= {
        "host_ms_per_step": medians.pop("host"),
        "of_which_drafter_ms": medians.pop("drafter"),
        "parts_ms": medians,
    }
    print(json.dumps(told))
    if asked.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
