"""Step loops for measurements: built from settings, run at a draft width, the drafter here or behind a socket."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.messages import RequestDelta, RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime.build import build_drafter_runner, build_from_blueprint, draw_blueprint
from dflash2_ray.runtime.drafter_server import DrafterServer
from dflash2_ray.runtime.target_loop import TargetLoop


@contextmanager
def running_loop(keys: dict[str, Any], *, separate: bool = False) -> Iterator[TargetLoop]:
    """separate: the drafter is served over a socket, by a thread of this process, on the same device."""
    config = ServiceConfig.from_keys(
        {
            **keys,
            "draft_width": "fixed",
            **({"drafter_placement": "separate", "draft_deadline_ms": 60_000} if separate else {}),
        }
    )
    blueprint = draw_blueprint(config)
    loop = build_from_blueprint(blueprint, config)
    ends: list[Callable[[], Any]] = [loop.close]
    try:
        if separate:
            server = DrafterServer(build_drafter_runner(blueprint), "secret")
            thread = threading.Thread(target=server.serve, daemon=True)
            thread.start()
            ends += [server.stop, functools.partial(thread.join, 30)]
            loop.draft_port.connect(server.address)  # type: ignore[union-attr]
        yield loop
    finally:
        for end in ends:
            end()


def has_graphs(loop: TargetLoop) -> bool:
    """Whether some work goes out as graphs, and none has been refused."""
    told = loop.describe()["cuda_graphs"].values()
    return bool(told) and all(one["failure"] is None for one in told)


@contextmanager
def launch_by_launch(loop: TargetLoop) -> Iterator[None]:
    """For a while no graph of this process is replayed."""
    runner, rounds = loop.runner, getattr(getattr(loop.draft_port, "runner", None), "rounds", None)
    verify_graphs, draft_graphs = runner.verify_graphs, None if rounds is None else rounds.graphs
    runner.verify_graphs = None
    if rounds is not None:
        rounds.graphs = None
    try:
        yield
    finally:
        runner.verify_graphs = verify_graphs
        if rounds is not None:
            rounds.graphs = draft_graphs


def add(loop: TargetLoop, name: str, prompt: Sequence[int], num_tokens: int, **options: Any) -> None:
    params = SamplingParams.from_keywords(max_tokens=num_tokens, ignore_eos=True, **options)
    loop.add(RequestSpec(name, tuple(prompt), params))


def step(loop: TargetLoop) -> list[RequestDelta]:
    """Raises RuntimeError for a request that ended with an error."""
    deltas = loop.step()
    for delta in deltas:
        if delta.finish_reason == "error":
            raise RuntimeError(f"request {delta.request_id}: {(delta.error or {}).get('message')}")
    return deltas


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Tokens all over the vocabulary."""
    return [
        [(index * 7919 + position * 104729 + 17) % (vocab_size - 8) for position in range(length)]
        for index in range(count)
    ]
