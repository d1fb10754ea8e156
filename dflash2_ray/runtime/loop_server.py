"""Drives a step loop from a channel: requests and aborts in, deltas out. One thread steps, one reads; it must not know ray."""

import queue
import threading
from typing import Any

from dflash2_ray.core.wire import pack_delta, pack_error, unpack_spec
from dflash2_ray.errors import DFlash2Error
from dflash2_ray.runtime.channel import Channel, ChannelClosed, Listener
from dflash2_ray.runtime.target_loop import TargetLoop


class LoopServer:
    """`run()` serves one front (the unit's replica) until that goes away or `stop()` is called.

    Frames in: {"add": spec}, {"abort": request_id}. Frames out: {"deltas": [...]}, {"refused": error, "request_id": id}.
    """

    def __init__(self, loop: TargetLoop, host: str, token: str) -> None:
        self.loop = loop
        self.listener = Listener(host, token)
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._channel: Channel | None = None

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
                self._inbox.put(channel.receive())
        except (ChannelClosed, ValueError):
            self._inbox.put(None)

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
            deltas = self.loop.step()
            if deltas:
                try:
                    channel.send({"deltas": [pack_delta(delta) for delta in deltas]})
                except ChannelClosed:
                    return "the front went away"

    def _handle(self, message: dict[str, Any], channel: Channel) -> None:
        if "abort" in message:
            self.loop.abort(message["abort"])
            return
        spec = message["add"]
        try:
            self.loop.add(unpack_spec(spec))
        except DFlash2Error as error:
            channel.send({"refused": pack_error(error), "request_id": spec["request_id"]})
