"""The short way of deltas: one socket per front and unit, one frame per step with what every request of that front got in it.

A Ray stream costs about a millisecond of both processes per item, and a step brings one item per request. So a front asks for
its request by Ray (admission, cancelling and loss stay there), is told the unit's address first, and takes the request over to
its line; if it cannot, everything comes by the Ray stream as it would without a line. It must not know what deltas mean.
"""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from dflash2_ray.errors import UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

Item = dict[str, Any]
_Key = tuple[str, int, str]  # host, port, token
TAKE_TIMEOUT_S = 2.0
_HELLO_TIMEOUT_S = 10.0
_UNREACHABLE_S = 60.0  # how long a front does not try again where it could not connect


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
        with contextlib.suppress(ChannelClosed):  # whoever serves the line notices the end
            self._channel.send({"items": items})


class LineServer:
    """The unit's door. `on_take(request_id, line)`: whether that request goes on there (`Mailbox.go_by`); `on_gone(line)`: the
    front went away; `on_stop(request_id, num_tokens)`: the front has the whole text, of so many tokens."""

    def __init__(
        self, on_take: Callable[[str, Line], bool], on_gone: Callable[[Line], None], on_stop: Callable[[str, int], None]
    ) -> None:
        self._on_take, self._on_gone, self._on_stop = on_take, on_gone, on_stop
        self._token = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._channels: set[AsyncChannel] = set()
        self.address: dict[str, Any] = {}

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.address = {"host": host, "port": self._server.sockets[0].getsockname()[1], "token": self._token}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = AsyncChannel(reader, writer)
        line = Line(channel)
        self._channels.add(channel)
        try:
            hello = await asyncio.wait_for(channel.receive(), _HELLO_TIMEOUT_S)
            if not isinstance(hello, dict) or not hmac.compare_digest(str(hello.get("token", "")), self._token):
                return
            while True:
                message = await channel.receive()
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


class Lines:
    """A front's lines, one per unit that it has taken requests from. Belongs to one event loop."""

    def __init__(self) -> None:
        self._open: dict[_Key, asyncio.Task[_FrontLine]] = {}
        self._unreachable: dict[_Key, float] = {}

    async def take(self, address: Mapping[str, Any], request_id: str) -> "asyncio.Queue[Item | None] | None":
        """Where the request's items come, None behind the last one of a line that broke; None: go on with the Ray stream."""
        key = _key(address)
        now = asyncio.get_running_loop().time()
        if now < self._unreachable.get(key, 0.0):
            return None
        if key not in self._open:
            self._open[key] = asyncio.create_task(_FrontLine.connect(key, lambda: self._open.pop(key, None)))
        task = self._open[key]
        try:
            async with asyncio.timeout(TAKE_TIMEOUT_S / 2):  # the unit waits longer than its front
                return await (await asyncio.shield(task)).take(request_id)
        except (OSError, TimeoutError, ChannelClosed):
            if self._open.get(key) is task:
                del self._open[key]
                task.cancel()
            self._unreachable[key] = now + _UNREACHABLE_S
            return None

    def leave(self, address: Mapping[str, Any], request_id: str, num_tokens: int | None = None) -> None:
        """The request is over; what still comes of it is dropped. num_tokens: of a text that ended before the engine did."""
        task = self._open.get(_key(address))
        if task is not None and task.done() and not task.exception():
            task.result().leave(request_id, num_tokens)


class _FrontLine:
    """A front's end of one line. on_end: called when the unit has hung up."""

    def __init__(self, channel: AsyncChannel, on_end: Callable[[], object]) -> None:
        self._channel = channel
        self._on_end = on_end
        self._queues: dict[str, asyncio.Queue[Item | None]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, key: _Key, on_end: Callable[[], object]) -> "_FrontLine":
        return cls(await AsyncChannel.connect(*key), on_end)

    async def take(self, request_id: str) -> "asyncio.Queue[Item | None] | None":
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            self._channel.send({"take": request_id})
            first = await queue.get()
            if first is None:
                raise ChannelClosed("the unit hung up")
        except BaseException:
            self.leave(request_id)
            raise
        if first["taken"]:
            return queue
        self.leave(request_id)
        return None

    def leave(self, request_id: str, num_tokens: int | None = None) -> None:
        self._queues.pop(request_id, None)
        if num_tokens is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send({"stop": request_id, "num_tokens": num_tokens})

    async def _read(self) -> None:
        try:
            while True:
                for request_id, item in (await self._channel.receive())["items"]:
                    queue = self._queues.get(request_id)
                    if queue is not None:
                        queue.put_nowait(item)
        except ChannelClosed:
            self._on_end()
            for queue in self._queues.values():
                queue.put_nowait(None)
        finally:
            self._channel.close()


def _key(address: Mapping[str, Any]) -> _Key:
    return str(address["host"]), int(address["port"]), str(address["token"])
