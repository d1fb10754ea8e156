"""The deployment that keeps the books of a service: one replica, so every front sees the same sum over all units.

Units report about once a second, and at once when a front wants to read (`next_round`), so what a client was told before it asks is in
the answer. A new replica first waits for the copies of its predecessor's books, then goes on; one that has to go hands its books to its
successor itself. It must not know Prometheus.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray import serve

from dflash2_ray.core.books import Books
from dflash2_ray.engine.farewell import application_goes_on, until_taken

BOOKKEEPER_DEPLOYMENT = "bookkeeper"
REPORT_PERIOD_S = 1.0
_SETTLING_S = 2.0  # for copies of the books to come, before new reports are taken
_READ_S = 0.3  # how long a reader waits for units
_AWAITED_S = 3.0  # a unit that was silent for longer is not waited for
_SILENT_S = 5.0  # then its gauges are dropped, and its processes are told as down
_FORGOTTEN_S = 60.0
_HAND_OVER_S = 2.0  # one try; there is no successor at first
_NUM_HOLDERS = 3  # units that get a copy with every report


@dataclass(slots=True)
class _Unit:
    """The newest word of one unit. round: of the last reading that it answered."""

    engine: str
    since: float
    heard: float
    round: int
    gauges: dict[str, Any]


class Bookkeeper:
    """`clock`: seconds. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._books = Books()
        self._clock = clock
        self._started = clock()
        self._units: dict[str, _Unit] = {}
        self._round = 0
        self._changed = asyncio.Condition()

    async def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """A unit's report: source, engine, number, growth, facts, gauges, round, last (it will not report again). taken: False while copies
        of earlier books may come; copy: for a unit that keeps one."""
        now, source = self._clock(), report["source"]
        settled = now - self._started >= _SETTLING_S
        if settled:
            self._books.take(source, report["engine"], report["number"], report["growth"], report["facts"])
        since = self._units[source].since if source in self._units else now
        self._units[source] = _Unit(report["engine"], since, now, report["round"], report["gauges"])
        if report["last"]:
            del self._units[source]
        self._forget(now)
        await self._tell()
        holds = source in [name for name, unit in self._units.items() if now - unit.heard < _AWAITED_S][:_NUM_HOLDERS]
        return {
            "taken": settled, "version": self._books.version, "round": self._round,
            "copy": self._books.state() if holds and settled else None,
        }  # fmt: skip

    async def next_round(self, known: int) -> int:
        """The round of readings, once it is another than `known`, or after a period."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_PERIOD_S), self._changed:
                await self._changed.wait_for(lambda: self._round != known)
        return self._round

    async def read(self) -> dict[str, Any]:
        """state: of the books; gauges: by engine. Up to date with every unit that answers."""
        self._round += 1
        wanted = self._round
        await self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_S), self._changed:
                await self._changed.wait_for(lambda: self._is_answered(wanted))
        return {"state": self._books.state(), "gauges": self._gauges()}

    async def join(self, state: dict[str, Any]) -> None:
        """A copy of the books that is ahead of them."""
        self._books.join(state)

    async def leave(self, successor: Any, goes_on: Callable[[], Awaitable[bool]]) -> None:
        """Hand the books to `successor`, the handle of this deployment, as soon as there is one and while `goes_on` says that it may come."""

        async def hand_over() -> bool:
            async with asyncio.timeout(_HAND_OVER_S):
                await successor.join.remote(self._books.state())
            return True

        if self._books.version:
            await until_taken(hand_over, goes_on)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _is_answered(self, wanted: int) -> bool:
        now = self._clock()
        return all(unit.round >= wanted for unit in self._units.values() if now - unit.heard < _AWAITED_S)

    def _forget(self, now: float) -> None:
        for source in [source for source, unit in self._units.items() if now - unit.heard > _FORGOTTEN_S]:
            del self._units[source]

    def _gauges(self) -> dict[str, dict[str, Any]]:
        """By engine, of the unit that has it now."""
        now = self._clock()
        self._forget(now)
        gauges: dict[str, dict[str, Any]] = {}
        for unit in sorted(self._units.values(), key=lambda unit: unit.since):
            silent = now - unit.heard > _SILENT_S
            gauges[unit.engine] = (
                {key: 0 for key in unit.gauges if key.startswith("rank_up/")} if silent else unit.gauges
            )
        return gauges


class BookkeeperReplica(Bookkeeper):
    """What Serve runs."""

    _is_leaving = False

    def __del__(self) -> Any:
        """Serve calls it when the replica has to go, and awaits what it returns."""
        if self._is_leaving:
            return None
        self._is_leaving = True
        here = serve.get_replica_context()
        return self.leave(serve.get_deployment_handle(here.deployment, here.app_name), application_goes_on)
