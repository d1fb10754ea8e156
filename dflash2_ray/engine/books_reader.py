"""A front's side of the books: it reads them, and never tells less than it has told."""

import asyncio
from typing import Any

from dflash2_ray.core.books import Books
from dflash2_ray.engine.farewell import LOST_CALL
from dflash2_ray.errors import UnitLost

_READ_S = 0.8


class BooksReader:
    """Holds what it has read, in case the bookkeeper is gone."""

    def __init__(self, bookkeeper: Any) -> None:
        self._bookkeeper = bookkeeper
        self._books = Books()

    async def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state of the books, gauges by engine), within a second; without a bookkeeper what was last read, and no gauges. Raises UnitLost
        as long as no unit has ever reported."""
        gauges: dict[str, Any] = {}
        try:
            async with asyncio.timeout(_READ_S):
                answer = await self._bookkeeper.read.remote()
            ahead = self._books.version > answer["state"]["version"]
            self._books.join(answer["state"])
            gauges = answer["gauges"]
            if ahead:
                self._bookkeeper.join.remote(self._books.state())
        except LOST_CALL:
            pass
        if not self._books.facts:
            raise UnitLost("no unit has reported yet")
        return self._books.state(), gauges
