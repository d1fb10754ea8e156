"""One generation of a unit's target ranks: placed, loaded, connected, watched, and killed together.

A generation is never repaired: when one rank is lost, or hangs, all go, and the unit starts the next one.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from dflash2_ray.config import ServiceConfig
from dflash2_ray.engine.placement import UnitPlacement
from dflash2_ray.engine.target_rank import TargetRank
from dflash2_ray.engine.worker import Worker
from dflash2_ray.errors import UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

_PING_PERIOD_S = 1.0
_SILENCE_S = (
    10.0  # a rank 0 that answers no ping for so long is stopped or starved: its reading thread does nothing else
)
Item = dict[str, Any]


class RankGroup:
    """`lost` resolves with the reason when the generation ended. Items of the step loop go to `on_item`."""

    def __init__(
        self, config: ServiceConfig, placement: UnitPlacement, generation: int, on_item: Callable[[Item], None]
    ) -> None:
        self.generation = generation
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.facts: dict[str, Any] = {}
        self.probe: dict[str, Any] | None = None  # what the start-up probe found
        self.target_folder = ""
        self.pulse: dict[str, Any] = {}
        self._num_pings = 0
        self._beats: list[tuple[int, asyncio.Future[None]]] = []  # who waits for the pulse of which ping
        self.num_items = 0  # that the step loop has delivered
        self._config = config
        self._placement = placement
        self._on_item = on_item
        self.ranks: list[Worker] = []
        self._channel: AsyncChannel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = 0.0

    # ---- start ------------------------------------------------------------------------------------------------------

    async def start(self, drafter_address: Awaitable[dict[str, Any]] | None) -> None:
        """Place, load, warm up, connect. Raises ConfigError, or what Ray raises; the caller kills the group then."""
        self.ranks = [Worker(TargetRank, self._placement, bundle) for bundle in self._placement.rank_bundles]
        await asyncio.gather(*(rank.locate() for rank in self.ranks))
        first = _node(self.ranks[0])
        self.ranks.sort(key=lambda rank: (_node(rank) != first, _node(rank)))  # ranks of one node are neighbours
        rendezvous = None
        if len(self.ranks) > 1:
            rendezvous = await self.ranks[0].call(
                "open_rendezvous", self.generation, len(self.ranks), self._config.step_timeout_s
            )
        loads = [
            rank.call("load", self._config, index, len(self.ranks), rendezvous) for index, rank in enumerate(self.ranks)
        ]
        names = [f"target rank {index}" for index in range(len(self.ranks))] if len(self.ranks) > 1 else ["target"]
        await asyncio.gather(
            *(rank.finish(load, name) for rank, load, name in zip(self.ranks, loads, names, strict=True))
        )
        self._watch(self.ranks[1:], first_rank=1)
        address = None if drafter_address is None else await drafter_address
        start = dict(await self.ranks[0].finish(self.ranks[0].call("warm_up", self._config, address), names[0]))
        self.facts, self.target_folder, self.probe = start["facts"], start["target_folder"], start["probe"]
        self._watch(self.ranks[:1], first_rank=0)
        self._channel = await AsyncChannel.connect(start["host"], start["port"], start["token"])
        self._tasks += [asyncio.create_task(self._pump()), asyncio.create_task(self._ping())]

    def _watch(self, ranks: Sequence[Worker], first_rank: int) -> None:
        self._tasks += [
            asyncio.create_task(self._await_end(rank, first_rank + offset)) for offset, rank in enumerate(ranks)
        ]

    async def _await_end(self, rank: Worker, index: int) -> None:
        try:
            reason = f"target rank {index} ended: {await rank.call('run')}"
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
            return dict(await self.ranks[0].call("describe"))
        except ray.exceptions.RayError as error:
            raise UnitLost(f"target rank 0 does not answer: {type(error).__name__}") from None

    async def fresh_pulse(self, timeout_s: float) -> dict[str, Any]:
        """The pulse of this moment, or the last one where none comes in time."""
        beat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(UnitLost, TimeoutError):
            waiting = (self._send_ping(), beat)
            self._beats.append(waiting)
            try:
                await asyncio.wait_for(beat, timeout_s)
            finally:
                self._beats.remove(waiting)
        return self.pulse

    def _send_ping(self) -> int:
        self._num_pings += 1
        self.send({"ping": self._num_pings})
        return self._num_pings

    async def _pump(self) -> None:
        assert self._channel is not None, "connected before it is pumped"
        try:
            while True:
                frame = await self._channel.receive()
                self._heard = asyncio.get_running_loop().time()
                if "pulse" in frame:
                    self.pulse = frame["pulse"]
                    for number, beat in self._beats:
                        if number <= self.pulse["ping"] and not beat.done():
                            beat.set_result(None)
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
                self._send_ping()
                await asyncio.sleep(_PING_PERIOD_S)
                age = self.pulse.get("step_age_s") or 0.0
                if age > self._config.step_timeout_s:
                    self._lose(
                        f"a step has run for {age:.0f} s, longer than step_timeout_s={self._config.step_timeout_s:g}"
                    )
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
        for rank in self.ranks:
            rank.kill()


def _node(rank: Worker) -> str:
    assert rank.place is not None, "located before it is sorted"
    return str(rank.place["node_id"])
