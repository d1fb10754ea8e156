"""Sends frames without ever blocking whoever hands them over.

A frame goes out at once as far as the socket takes it; a thread of its own sends the rest, and everything behind it, in order.
What waits is bounded. It must not know what the frames mean.
"""

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash2_ray.runtime.channel import Channel, ChannelClosed, frame_parts
from dflash2_ray.runtime.tensor_lane import TensorLane

_MOST_PARTS = 64  # of one system call


class FrameWriter:
    """The one sender of `channel`. `lane`: the way of tensors that do not travel in the frame. `on_failure(reason)`: called
    once from the writer's thread when the other side is gone."""

    def __init__(
        self,
        channel: Channel,
        *,
        max_queued_bytes: int,
        on_failure: Callable[[str], None],
        lane: TensorLane | None = None,
    ) -> None:
        self.queued_bytes = 0
        self._channel, self._lane = channel, lane
        self._max_queued_bytes, self._on_failure = max_queued_bytes, on_failure
        self._items: deque[memoryview | torch.Tensor] = deque()
        self._changed = threading.Condition()
        self._lane_busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="frame-writer", daemon=True)
        self._thread.start()

    def put(self, message: Any, buffers: Sequence[memoryview] = (), tensors: Sequence[torch.Tensor] = ()) -> bool:
        """Queue a frame, and behind it the tensors of the lane; their memory must not change any more. False, with nothing
        queued, when too much waits already (a single frame of any size is taken). Raises ChannelClosed."""
        parts = frame_parts(message, buffers)
        size = sum(part.nbytes for part in parts) + sum(tensor.nbytes for tensor in tensors)
        with self._changed:
            if self._closed:
                raise ChannelClosed("connection closed")
            if self.queued_bytes and self.queued_bytes + size > self._max_queued_bytes:
                return False
            self._items.extend(parts)
            self._items.extend(tensors)
            self.queued_bytes += size
            if not self._lane_busy:
                self._send_views()
            if self._items:
                self._changed.notify()
        return True

    def close(self) -> None:
        """Drop what waits and end the thread and the lane; the channel is the owner's to close."""
        with self._changed:
            self._close()
        if self._lane is not None:
            self._lane.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, behind the closing of writer and channel."""
        self._thread.join(timeout_s)

    def _close(self) -> None:
        self._closed = True
        self._items.clear()
        self._changed.notify()

    def _send_views(self) -> None:
        """Send from the front of the queue until the socket is full, the queue is empty, or a tensor's turn has come.
        The lock is held. Raises ChannelClosed."""
        while self._items and isinstance(self._items[0], memoryview):
            parts: list[memoryview] = []
            for item in self._items:
                if not isinstance(item, memoryview) or len(parts) == _MOST_PARTS:
                    break
                parts.append(item)
            try:
                sent = self._channel.socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._close()
                raise ChannelClosed(str(error)) from None
            self.queued_bytes -= sent
            while sent:
                part = self._items.popleft()
                assert isinstance(part, memoryview), "only memory was sent"
                if sent < part.nbytes:
                    self._items.appendleft(part[sent:])
                    break
                sent -= part.nbytes

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._items and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    tensor = self._items.popleft() if isinstance(self._items[0], torch.Tensor) else None
                    self._lane_busy = tensor is not None
                if isinstance(tensor, torch.Tensor):
                    self._send_tensor(tensor)
                else:
                    self._wait_for_room()
                    with self._changed:
                        self._send_views()
        except (ChannelClosed, OSError, RuntimeError, ValueError) as error:
            self.close()
            self._on_failure(str(error))

    def _send_tensor(self, tensor: torch.Tensor) -> None:
        assert self._lane is not None, "tensors need a lane"
        try:
            self._lane.send(tensor)
        finally:
            with self._changed:
                self._lane_busy = False
                self.queued_bytes -= tensor.nbytes

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLOUT)
        with contextlib.suppress(InterruptedError):
            poll.poll()
