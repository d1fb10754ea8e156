"""The short way of deltas, the front's end: a line to every unit that it has taken requests from, and what units say of their places.

It must not know what deltas mean, but for which of them ends a request.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dflash2_ray.core.full_units import FullUnits
from dflash2_ray.core.wire import ends
from dflash2_ray.engine.delta_line import TAKE_TIMEOUT_S, Item
from dflash2_ray.errors import Overloaded
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

_Key = tuple[str, int, str]  # host, port, token
_UNREACHABLE_S = 60.0  # how long a front does not try again where it could not connect


class Inbox:
    """One request's items as they come; None behind the last one of a line that broke."""

    def __init__(self) -> None:
        self._items: list[Item | None] = []
        self._any, self._ended = asyncio.Event(), asyncio.Event()

    def put(self, item: Item | None) -> None:
        """The next item."""
        self._items.append(item)
        self._any.set()
        if item is None or ends(item):
            self._ended.set()

    async def take(self, hold_s: float = 0.0) -> list[Item | None]:
        """All that came, at least one. hold_s: seconds from now in which more may come, unless the request ends."""
        until = asyncio.get_running_loop().time() + hold_s
        await self._any.wait()
        if hold_s > 0 and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._ended.wait()
        items, self._items = self._items, []
        self._any.clear()
        return items


class Lines:
    """A front's lines, one per unit that it has taken requests from. Belongs to one event loop."""

    def __init__(self) -> None:
        self._open: dict[_Key, asyncio.Task[_FrontLine]] = {}
        self._unreachable: dict[_Key, float] = {}
        self._by_unit: dict[str, _FrontLine] = {}
        self._full = FullUnits()

    async def take(self, address: Mapping[str, Any], request_id: str) -> "Inbox | None":
        """Where the request's items come, None behind the last one of a line that broke; None: go on with the Ray stream."""
        key = _key(address)
        now = asyncio.get_running_loop().time()
        if now < self._unreachable.get(key, 0.0):
            return None
        if key not in self._open:
            self._open[key] = asyncio.create_task(self._connect(key, str(address["unit"])))
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

    async def _connect(self, key: _Key, unit: str) -> "_FrontLine":
        def ended() -> None:
            self._open.pop(key, None)
            if self._by_unit.get(unit) is line:
                del self._by_unit[unit]
                self._full.forget(unit)

        channel = await AsyncChannel.connect(*key)
        line = self._by_unit[unit] = _FrontLine(channel, lambda notice: self._full.told(unit, notice), ended)
        return line

    def refuse(self, running: Collection[str]) -> Overloaded | None:
        """A refusal in the name of one of the units that run, if all of them are known to be full; it is told."""
        refusal = self._full.refuse(running)
        if refusal is None:
            return None
        unit, error = refusal
        self._by_unit[unit].refused(1)
        return error

    def leave(self, address: Mapping[str, Any], request_id: str, num_tokens: int | None = None) -> None:
        """The request is over; what still comes of it is dropped. num_tokens: of a text that ended before the engine did."""
        task = self._open.get(_key(address))
        if task is not None and task.done() and not task.exception():
            task.result().leave(request_id, num_tokens)


class _FrontLine:
    """A front's end of one line. on_notice: called with the unit's `Places.notice` when it changed; on_end: when the unit has hung up."""

    def __init__(
        self, channel: AsyncChannel, on_notice: Callable[[Item | None], None], on_end: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._on_notice, self._on_end = on_notice, on_end
        self._inboxes: dict[str, Inbox] = {}
        self._reader = asyncio.create_task(self._read())

    async def take(self, request_id: str) -> "Inbox | None":
        inbox = self._inboxes[request_id] = Inbox()
        try:
            self._channel.send({"take": request_id})
            first, *items = await inbox.take()
            if first is None:
                raise ChannelClosed("the unit hung up")
            for item in items:
                inbox.put(item)
        except BaseException:
            self.leave(request_id)
            raise
        if first["taken"]:
            return inbox
        self.leave(request_id)
        return None

    def leave(self, request_id: str, num_tokens: int | None = None) -> None:
        self._inboxes.pop(request_id, None)
        if num_tokens is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send({"stop": request_id, "num_tokens": num_tokens})

    def refused(self, count: int) -> None:
        """Tell the unit of requests that were refused in its name."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"refused": count})

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._channel.receive()
                if "full" in frame:
                    self._on_notice(frame["full"])
                for request_id, item in frame.get("items", ()):
                    inbox = self._inboxes.get(request_id)
                    if inbox is not None:
                        inbox.put(item)
        except ChannelClosed:
            self._on_end()
            for inbox in self._inboxes.values():
                inbox.put(None)
        finally:
            self._channel.close()


def _key(address: Mapping[str, Any]) -> _Key:
    return str(address["host"]), int(address["port"]), str(address["token"])
