"""One generation of a unit's target ranks: placed, loaded, connected, watched, and killed together.

A generation is never repaired: when one rank is lost, or hangs, all go, and the unit starts the next one.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash2_ray.config import ServiceConfig
from dflash2_ray.engine.placement import UnitPlacement
from dflash2_ray.engine.target_rank import TargetRank
from dflash2_ray.engine.worker_actor import WORKER_ENVIRONMENT
from dflash2_ray.errors import ConfigError, UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

logger = logging.getLogger("ray.serve")
_PROGRESS_PERIOD_S = 0.5
_PING_PERIOD_S = 1.0
_SILENCE_S = 10.0  # a rank 0 that answers no ping for so long is stopped or starved: its reading thread does nothing else
Item = dict[str, Any]


class RankGroup:
    """`lost` resolves with the reason when the generation ended. Items of the step loop go to `on_item`."""

    def __init__(
        self, config: ServiceConfig, placement: UnitPlacement, generation: int, on_item: Callable[[Item], None]
    ) -> None:
        self.generation = generation
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.facts: dict[str, Any] = {}
        self.target_folder = ""
        self.pulse: dict[str, Any] = {}
        self.num_items = 0  # that the step loop has delivered
        self.whereabouts: list[dict[str, Any]] = []
        self._config = config
        self._placement = placement
        self._on_item = on_item
        self._ranks: list[Any] = []
        self._channel: AsyncChannel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = 0.0

    # ---- start ------------------------------------------------------------------------------------------------------

    async def start(self, drafter_address: Awaitable[dict[str, Any]] | None) -> None:
        """Place, load, warm up, connect. Raises ConfigError, or what Ray raises; the caller kills the group then."""
        self._ranks = [start_worker(TargetRank, self._placement, bundle) for bundle in self._placement.rank_bundles]
        places = await asyncio.gather(*(rank.whereabouts.remote() for rank in self._ranks))
        order = sorted(range(len(places)), key=lambda i: (places[i]["node_id"] != places[0]["node_id"], places[i]["node_id"], i))
        self._ranks, self.whereabouts = [self._ranks[i] for i in order], [places[i] for i in order]
        rendezvous = None
        if len(self._ranks) > 1:
            rendezvous = await self._ranks[0].open_rendezvous.remote(self.generation, len(self._ranks))
        loads = [
            rank.load.remote(self._config, index, len(self._ranks), rendezvous) for index, rank in enumerate(self._ranks)
        ]
        await with_progress(self._ranks[0], asyncio.gather(*loads), "target")
        self._watch(self._ranks[1:], first_rank=1)
        address = None if drafter_address is None else await drafter_address
        start = dict(await with_progress(self._ranks[0], self._ranks[0].warm_up.remote(address), "target"))
        self.facts, self.target_folder = start["facts"], start["target_folder"]
        self._watch(self._ranks[:1], first_rank=0)
        self._channel = await AsyncChannel.connect(start["host"], start["port"], start["token"])
        self._tasks += [asyncio.create_task(self._pump()), asyncio.create_task(self._ping())]

    def _watch(self, ranks: Sequence[Any], first_rank: int) -> None:
        self._tasks += [
            asyncio.create_task(self._await_end(rank, first_rank + offset)) for offset, rank in enumerate(ranks)
        ]

    async def _await_end(self, rank: Any, index: int) -> None:
        try:
            reason = f"target rank {index} ended: {await rank.run.remote()}"
        except ray.exceptions.RayError as error:
            reason = f"target rank {index} died: {type(error).__name__}"
        self._lose(reason)

    # ---- serving ----------------------------------------------------------------------------------------------------

    def send(self, message: Item) -> None:
        """To the step loop. Raises UnitLost."""
        try:
            if self._channel is None:
                raise ChannelClosed("not connected yet")
            self._channel.send(message)
        except ChannelClosed as error:
            self._lose(f"the connection to target rank 0 closed: {error}")
            raise UnitLost(str(error)) from None

    async def describe(self) -> dict[str, Any]:
        """The step loop's own description. Raises UnitLost."""
        try:
            return dict(await self._ranks[0].describe.remote())
        except ray.exceptions.RayError as error:
            raise UnitLost(f"target rank 0 does not answer: {type(error).__name__}") from None

    async def _pump(self) -> None:
        assert self._channel is not None, "connected before it is pumped"
        try:
            while True:
                frame = await self._channel.receive()
                self._heard = asyncio.get_running_loop().time()
                if "pulse" in frame:
                    self.pulse = frame["pulse"]
                    continue
                for item in frame.get("deltas") or [frame]:
                    self.num_items += 1
                    self._on_item(item)
        except ChannelClosed as error:
            self._lose(f"the connection to target rank 0 closed: {error}")

    async def _ping(self) -> None:
        """Find a hang: a step that takes longer than `step_timeout_s`, or a process that answers nothing."""
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        with contextlib.suppress(UnitLost):
            while not self.lost.done():
                self.send({"ping": self.generation})
                await asyncio.sleep(_PING_PERIOD_S)
                age = self.pulse.get("step_age_s") or 0.0
                if age > self._config.step_timeout_s:
                    self._lose(f"a step has run for {age:.0f} s, longer than step_timeout_s={self._config.step_timeout_s:g}")
                elif loop.time() - self._heard > _SILENCE_S:
                    self._lose(f"target rank 0 has answered nothing for {_SILENCE_S:.0f} s")

    # ---- end --------------------------------------------------------------------------------------------------------

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def kill(self) -> None:
        """End every process of this generation at once."""
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.close()
        for rank, place in zip(self._ranks, [*self.whereabouts, *[None] * len(self._ranks)], strict=False):
            kill_worker(rank, place)


def start_worker(kind: type, placement: UnitPlacement, bundle: int) -> Any:
    """A new actor of class `kind` in the given bundle of this replica's placement group."""
    actor: Any = ray.remote(kind)
    return actor.options(
        max_restarts=0,
        max_concurrency=4,
        num_cpus=placement.worker.get("CPU", 0),
        num_gpus=placement.worker.get("GPU", 0),
        scheduling_strategy=_own_bundle(bundle),
        runtime_env={"env_vars": WORKER_ENVIRONMENT},
    ).remote()


def _own_bundle(index: int) -> Any:
    group = get_current_placement_group()
    if group is None:  # a replica without a group (local testing) places its workers anywhere
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def kill_worker(actor: Any, place: dict[str, Any] | None) -> None:
    """Kill an actor. One on this node is also killed by process id, because a stopped process answers no request to exit."""
    ray.kill(actor)
    if place is not None and place["node_id"] == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(place["pid"], signal.SIGKILL)


async def with_progress(worker: Any, work: Awaitable[Any], name: str) -> Any:
    """Await `work` of a worker, with a line of progress whenever a phase, or a tenth of it, is done. Raises ConfigError."""
    waiting = asyncio.ensure_future(work)
    shown: tuple[str, int] = ("", -1)
    while True:
        done, _ = await asyncio.wait({waiting}, timeout=_PROGRESS_PERIOD_S)
        if done:
            break
        phase, at, total = await worker.progress.remote()
        step = (phase, int(10 * at / max(total, 1)))
        if step != shown:
            logger.info("start-up of the %s: %s %d %%", name, phase, 100 * at / max(total, 1))
            shown = step
    try:
        return waiting.result()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            logger.error("this configuration cannot be served: %s", error.cause)
            raise error.cause from None
        raise
