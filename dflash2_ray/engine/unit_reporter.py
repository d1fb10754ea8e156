"""A unit's side of the books: it tells the bookkeeper what came to its numbers, and keeps a copy of the books for its successor."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dflash2_ray.core.books import Books
from dflash2_ray.core.ledger import Numbers, growth_since
from dflash2_ray.engine.bookkeeper import REPORT_PERIOD_S
from dflash2_ray.engine.farewell import LOST_CALL, until_taken

_CALL_S = 2.0
Count = tuple[Numbers, dict[str, Any], dict[str, Any]]
"""(numbers since the start, gauges, facts), as in `Books` and `Bookkeeper`."""


class UnitReporter:
    """`count` is asked for every report. `engine`: this unit's index now. on_growth: told of everything once, with the gauges."""

    def __init__(
        self, bookkeeper: Any, count: Callable[[], Awaitable[Count]], engine: Callable[[], str],
        on_growth: Callable[[str, Numbers, Mapping[str, Any], Mapping[str, Any]], None],
    ) -> None:  # fmt: skip
        self._bookkeeper = bookkeeper
        self._count, self._engine, self._on_growth = count, engine, on_growth
        self._source = uuid.uuid4().hex
        self._told: Numbers = {}
        self._number = 0
        self._pending: tuple[int, str, Numbers] | None = None  # (number, engine, growth) that no answer came to yet
        self._round = 0
        self._copy = Books()

    async def run(self) -> None:
        """Report for ever, about once a second and whenever somebody reads."""
        while True:
            try:
                await self.report()
                self._round = await self._call("next_round", self._round)
            except LOST_CALL:
                await asyncio.sleep(REPORT_PERIOD_S)

    async def start(self) -> None:
        """The first report, so that a service that is ready has its names; a bookkeeper that does not come stops no unit."""
        with contextlib.suppress(*LOST_CALL):
            async with asyncio.timeout(2 * _CALL_S):
                while not await self.report():
                    await asyncio.sleep(REPORT_PERIOD_S / 4)

    async def leave(self, goes_on: Callable[[], Awaitable[bool]]) -> None:
        """The last report, again until it is taken or `goes_on` says that the application does not."""
        await until_taken(lambda: self.report(last=True), goes_on)

    async def report(self, *, last: bool = False) -> bool:
        """Tell what came since the last report, behind what has not arrived yet. Returns whether it was taken."""
        round_, late = self._round, self._pending is not None
        numbers, gauges, facts = await self._count()
        if late and not await self._send(gauges, facts, round_, last=False):
            return False
        engine, growth = self._engine(), growth_since(self._told, numbers)
        self._told = numbers
        self._number += 1
        self._pending = (self._number, engine, growth)
        self._on_growth(engine, growth, gauges, facts)
        return await self._send(gauges, facts, round_, last=last)

    async def _send(self, gauges: Mapping[str, Any], facts: Mapping[str, Any], round_: int, *, last: bool) -> bool:
        assert self._pending is not None, "there is something to tell"
        number, engine, growth = self._pending
        answer = await self._call(
            "report",
            {
                "source": self._source,
                "engine": engine,
                "number": number,
                "growth": growth,
                "facts": facts,
                "gauges": gauges,
                "round": round_,
                "last": last,
            },
        )
        if answer["version"] < self._copy.version:
            await self._call("join", self._copy.state())
        if answer["copy"] is not None:
            self._copy.join(answer["copy"])
        if answer["taken"]:
            self._pending = None
        return bool(answer["taken"])

    async def _call(self, method: str, argument: Any) -> Any:
        async with asyncio.timeout(_CALL_S):
            return await getattr(self._bookkeeper, method).remote(argument)
