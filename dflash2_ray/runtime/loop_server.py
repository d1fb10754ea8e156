"""Drives a step loop from a channel: requests and aborts in, deltas out. One thread steps, one reads; it must not know ray.

The reading thread also answers pings with how the steps are going, so a step that hangs is told apart from a long one.
"""

import logging
import queue
import threading
import time
from typing import Any

from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.core.wire import pack_delta, pack_error, unpack_spec
from dflash2_ray.errors import DFlash2Error, UnitLost
from dflash2_ray.runtime.channel import Channel, ChannelClosed, Listener
from dflash2_ray.runtime.draft_link import RemoteDraftPort
from dflash2_ray.runtime.target_loop import TargetLoop

failure_log = FailureLog(logging.getLogger(__name__))
_CONNECT_S = 5.0  # a drafter that does not answer for so long is not there


def connect_drafter(loop: TargetLoop, address: dict[str, Any]) -> None:
    """Let the loop take up the drafter at `address`. One that does not answer, hung perhaps, is noted only: the loop goes on
    without it, and its owner sees that it is not connected."""
    port = loop.draft_port
    if isinstance(port, RemoteDraftPort):
        try:
            port.connect(address, _CONNECT_S)
        except (OSError, ChannelClosed, ValueError) as error:
            failure_log.warning("no connection to the drafter: %s: %s", type(error).__name__, error)


class LoopServer:
    """`run()` serves one front (the unit's replica) until that goes away or `stop()` is called.

    Frames in: {"add": spec}, {"abort": request_id}, {"tune": settings}, {"drafter": address}, {"ping": n}. Frames out: {"deltas": [...]},
    {"refused": error, "request_id": id}, {"pulse": {...}}.
    """

    def __init__(self, loop: TargetLoop, host: str, token: str) -> None:
        self.loop = loop
        self.listener = Listener(host, token)
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._step_started: float | None = None

    def run(self) -> str:
        """Serve until the end; returns why it ended."""
        try:
            channel = self.listener.accept()
        except OSError:
            return "stopped before a front connected"
        self._channel = channel
        reader = threading.Thread(target=self._read, args=(channel,), name="loop-reader", daemon=True)
        reader.start()
        try:
            return self._serve(channel)
        finally:
            channel.close()
            self.listener.close()
            self.loop.close()

    def stop(self) -> None:
        """End `run()` after the step in progress."""
        self._inbox.put(None)
        if self._channel is None:
            self.listener.close()

    def _read(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if "ping" in message:
                    channel.send({"pulse": self.pulse()})
                elif "drafter" in message:  # connecting may take a while
                    threading.Thread(target=connect_drafter, args=(self.loop, message["drafter"]), daemon=True).start()
                else:
                    self._inbox.put(message)
        except (ChannelClosed, ValueError):
            self._inbox.put(None)

    def pulse(self) -> dict[str, Any]:
        """num_steps; step_age_s: seconds since the step in progress began, None between steps; kv_usage: share of the pages in use;
        drafter: its port's state, None without a port that can lose it."""
        started = self._step_started
        return {
            "num_steps": self.loop.num_steps,
            "step_age_s": None if started is None else time.monotonic() - started,
            "kv_usage": 1 - self.loop.pool.num_free / self.loop.pool.num_pages,
            "drafter": self._drafter_state(),
        }

    def _drafter_state(self) -> dict[str, Any] | None:
        port = self.loop.draft_port
        if not isinstance(port, RemoteDraftPort):
            return None
        return {"connected": port.connected, "suspect": port.suspect, "connection": port.generation}

    def _serve(self, channel: Channel) -> str:
        while True:
            wait = not self.loop.has_work
            try:
                while True:
                    message = self._inbox.get(block=wait)
                    if message is None:
                        return "the front went away"
                    self._handle(message, channel)
                    wait = False
            except queue.Empty:
                pass
            self._step_started = time.monotonic()
            try:
                deltas = self.loop.step()
            except UnitLost as error:
                return f"a target rank was lost: {error}"
            self._step_started = None
            if deltas:
                try:
                    channel.send({"deltas": [pack_delta(delta) for delta in deltas]})
                except ChannelClosed:
                    return "the front went away"

    def _handle(self, message: dict[str, Any], channel: Channel) -> None:
        if "abort" in message:
            self.loop.abort(message["abort"])
            return
        if "tune" in message:
            self.loop.tune(**message["tune"])
            return
        spec = message["add"]
        try:
            self.loop.add(unpack_spec(spec))
        except DFlash2Error as error:
            channel.send({"refused": pack_error(error), "request_id": spec["request_id"]})
