"""The short way of deltas, the unit's end: one socket per front and unit, one frame per step with what every request of that front got.

A Ray stream costs about a millisecond of both processes per item, and a step brings one item per request. So a front asks for
its request by Ray (admission, cancelling and loss stay there), is told the unit's address first, and takes the request over to
its line; if it cannot, everything comes by the Ray stream as it would without a line. The unit also says there when all its places
are taken, and the front (`front_lines.py`) whom it refused because of that. It must not know what deltas mean.
"""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Callable
from typing import Any

from dflash2_ray.errors import UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

Item = dict[str, Any]
TAKE_TIMEOUT_S = 2.0
_HELLO_TIMEOUT_S = 10.0


class Line:
    """The unit's end of one front's line."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._pending: list[tuple[str, Item]] = []

    def post(self, request_id: str, item: Item) -> None:
        """Send one request's item, in one frame with all that are posted before the event loop turns."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((request_id, item))

    def _flush(self) -> None:
        items, self._pending = self._pending, []
        self._send({"items": items})

    def tell(self, notice: Item | None) -> None:
        """Send what `Places.notice` says now."""
        self._send({"full": notice})

    def _send(self, frame: dict[str, Any]) -> None:
        with contextlib.suppress(ChannelClosed):  # whoever serves the line notices the end
            self._channel.send(frame)


class LineServer:
    """The unit's door. `on_take(request_id, line)`: whether that request goes on there (`Mailbox.go_by`); `on_gone(line)`: the
    front went away; `on_stop(request_id, num_tokens)`: the front has the whole text, of so many tokens; `on_refused(count)`: the front
    refused so many on this unit's behalf; `notice()`: what it refuses with (`Places.notice`)."""

    def __init__(
        self,
        on_take: Callable[[str, Line], bool],
        on_gone: Callable[[Line], None],
        on_stop: Callable[[str, int], None],
        on_refused: Callable[[int], None],
        notice: Callable[[], Item | None],
    ) -> None:
        self._on_take, self._on_gone, self._on_stop = on_take, on_gone, on_stop
        self._on_refused, self._notice = on_refused, notice
        self._token = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._channels: set[AsyncChannel] = set()
        self._fronts: set[Line] = set()  # that have introduced themselves
        self.address: dict[str, Any] = {}

    async def start(self, host: str, unit: str) -> None:
        """Listen on a free port of `host`, as the unit that Serve calls `unit`. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.address = {
            "host": host,
            "port": self._server.sockets[0].getsockname()[1],
            "token": self._token,
            "unit": unit,
        }

    def tell(self) -> None:
        """Send all fronts the notice, because it changed."""
        notice = self._notice()
        for line in self._fronts:
            line.tell(notice)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = AsyncChannel(reader, writer)
        line = Line(channel)
        self._channels.add(channel)
        try:
            hello = await asyncio.wait_for(channel.receive(), _HELLO_TIMEOUT_S)
            if not isinstance(hello, dict) or not hmac.compare_digest(str(hello.get("token", "")), self._token):
                return
            self._fronts.add(line)
            line.tell(self._notice())
            while True:
                message = await channel.receive()
                if "refused" in message:
                    self._on_refused(int(message["refused"]))
                    continue
                if "stop" in message:
                    self._on_stop(str(message["stop"]), int(message["num_tokens"]))
                    continue
                request_id = str(message["take"])
                if not self._on_take(request_id, line):
                    line.post(request_id, {"taken": False})
        except (ChannelClosed, TimeoutError, ValueError, KeyError, TypeError):
            return
        finally:
            self._channels.discard(channel)
            self._fronts.discard(line)
            channel.close()
            self._on_gone(line)

    def close(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
        for channel in self._channels:
            channel.close()


class Mailbox:
    """Where a unit keeps one request's items until someone takes them: by `get`, or, once `go_by` has said so, by a line.

    An item that ends the request (`ends`) comes by `get` in both cases, so that whoever serves the request knows. on_item: called
    with every item.
    """

    def __init__(self, request_id: str, ends: Callable[[Item], bool], on_item: Callable[[], None]) -> None:
        self._request_id = request_id
        self._ends, self._on_item = ends, on_item
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue()
        self._decided = asyncio.Event()
        self.line: Line | None = None

    def put(self, item: Item) -> None:
        """The request's next item."""
        self._on_item()
        if self.line is not None:
            self.line.post(self._request_id, item)
        if self.line is None or self._ends(item):
            self._queue.put_nowait(item)

    def go_by(self, line: Line) -> bool:
        """Send everything by `line` from now on, what waits included. False when it is too late for that."""
        if self._decided.is_set():
            return False
        self._decided.set()
        waiting = self.waiting()
        self.line = line
        line.post(self._request_id, {"taken": True})
        for item in waiting:
            self.put(item)
        return True

    def hang_up(self) -> None:
        """Nobody waits for the request here any more: `get` raises UnitLost."""
        self._queue.put_nowait(None)

    async def decided(self, timeout_s: float) -> None:
        """Wait until a line has taken the request, at most so long; then it is too late."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._decided.wait()
        self._decided.set()

    def waiting(self) -> list[Item]:
        """What can be had without waiting."""
        items: list[Item] = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is None:
                self._queue.put_nowait(None)
                break
            items.append(item)
        return items

    async def get(self) -> Item:
        """The next item that does not go by a line. Raises UnitLost behind `hang_up`."""
        item = await self._queue.get()
        if item is None:
            raise UnitLost("whoever asked for the request went away, or asks again")
        return item
