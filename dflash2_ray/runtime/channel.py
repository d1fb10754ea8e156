"""Framed messages over a TCP or Unix socket: a 4-byte length, then msgpack. Blocking for loops, asyncio for servers.

A frame may carry raw buffers behind its message: bit 31 of the length says so, the msgpack body is then [message, sizes], and
the buffers follow as they lie in memory. Each side proves itself with the channel's token in its first frame. An address
is a plain dict: {"host", "port", "token"} or {"path", "token"}. It must not know what the messages mean.
"""

import asyncio
import contextlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
_WITH_BUFFERS = 1 << 31
MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_BUFFER_BYTES = 1024 * 1024 * 1024
_LARGEST_UNIX_PATH = 107  # sun_path holds 108 bytes with the final zero
_SILENT_HOST_S = 60  # a host that acknowledges nothing for so long is gone
_CHUNK_BYTES = 64 * 1024  # of one read; what a frame needs beyond it is read to where it stays


class ChannelClosed(Exception):
    """The other side went away."""


class Listener:
    """A listening socket: on a free port of `host` (`port` is where), or on the Unix path `path`. `accept` waits for one peer
    that knows the token."""

    def __init__(self, host: str, token: str, *, path: str | None = None) -> None:
        self._token, self._host, self._path = token, host, path
        if path is None:
            self._socket = socket.create_server((host, 0))
            self.port: int = self._socket.getsockname()[1]
        else:
            self._socket = _unix_server(path)
            self.port = 0

    @property
    def address(self) -> dict[str, Any]:
        """What `Channel.connect` needs."""
        if self._path is not None:
            return {"path": self._path, "token": self._token}
        return {"host": self._host, "port": self.port, "token": self._token}

    def accept(self) -> "Channel":
        """The next peer with the right token; others are turned away. Raises OSError once closed."""
        while True:
            peer, _ = self._socket.accept()
            channel = Channel(peer)
            channel.set_timeout(10.0)  # a stranger that says nothing must not block the door
            try:
                hello = channel.receive()
            except (ChannelClosed, OSError, ValueError):
                channel.close()
                continue
            if isinstance(hello, dict) and hmac.compare_digest(str(hello.get("token", "")), self._token):
                channel.set_timeout(None)
                return channel
            channel.close()

    def close(self) -> None:
        """Stop listening; a waiting `accept` raises OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


class Channel:
    """One connection; `send` may be called from several threads, `receive` and `arrived_frame` from one at a time."""

    def __init__(self, peer: socket.socket) -> None:
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _watch_for_silence(peer)
        self.socket = peer
        self._lock = threading.Lock()
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._start = self._stop = 0  # what has been read into the chunk and belongs to no frame yet
        self._partial: _Partial | None = None

    @classmethod
    def connect(cls, address: Mapping[str, Any], timeout_s: float | None = None) -> "Channel":
        """Connect to a listener and introduce ourselves; `timeout_s` also bounds every receive until `set_timeout`.
        Raises OSError, and ChannelClosed when the listener went away."""
        if "path" in address:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(timeout_s)
            try:
                peer.connect(address["path"])
            except OSError:
                peer.close()
                raise
        else:
            peer = socket.create_connection((address["host"], address["port"]), timeout=timeout_s)
        channel = cls(peer)
        channel.send({"token": address["token"]})
        return channel

    @property
    def local_host(self) -> str:
        """The address of this machine that the other side reaches."""
        return "127.0.0.1" if self.socket.family == socket.AF_UNIX else str(self.socket.getsockname()[0])

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound every later receive; one that runs out ends the channel, as the rest of its frame could come at any time."""
        self.socket.settimeout(timeout_s)

    def send(self, message: Any, buffers: Sequence[memoryview] = ()) -> None:
        """Raises ChannelClosed when the other side is gone."""
        try:
            with self._lock:
                for part in frame_parts(message, buffers):
                    self.socket.sendall(part)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Any:
        """The next message. Raises ChannelClosed at the end, ValueError for a frame that is none or has buffers."""
        message, buffers = self.receive_frame()
        if buffers:
            raise ValueError(f"a frame with {len(buffers)} buffers; expected none")
        return message

    def receive_frame(self) -> tuple[Any, list[bytearray]]:
        """The next message and its buffers. Raises ChannelClosed at the end, ValueError for a frame that is none."""
        while (frame := self._whole_frame()) is None:
            self._read(0)
        return frame

    def arrived_frame(self) -> tuple[Any, list[bytearray]] | None:
        """The next message and its buffers if they have arrived; never waits. Without a receive timeout only. Raises as
        `receive_frame`, for the end behind the last whole frame."""
        while (frame := self._whole_frame()) is None:
            if not self._read(socket.MSG_DONTWAIT):
                return None
        return frame

    def _read(self, flags: int) -> bool:
        """Read once, into the frame at hand where it takes a whole chunk; False if nothing is there. Raises ChannelClosed."""
        partial = self._partial
        direct = partial is not None and self._start == self._stop and partial.num_missing >= _CHUNK_BYTES
        if direct:
            target = memoryview(partial.newest)[partial.filled :]  # type: ignore[union-attr]
        else:
            if self._start:
                left = self._stop - self._start
                self._chunk[:left] = self._chunk[self._start : self._stop]
                self._start, self._stop = 0, left
            target = self._chunk[self._stop :]
        try:
            count = self.socket.recv_into(target, 0, flags)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not count:
            raise ChannelClosed("end of stream")
        if direct:
            partial.filled += count  # type: ignore[union-attr]
        else:
            self._stop += count
        return True

    def _whole_frame(self) -> tuple[Any, list[bytearray]] | None:
        """Take a frame out of what was read; None where more must come."""
        if self._partial is None:
            if self._stop - self._start < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack_from(self._chunk, self._start)
            self._start += _LENGTH.size
            self._partial = _Partial(bool(length & _WITH_BUFFERS), _checked(length & ~_WITH_BUFFERS))
        partial = self._partial
        while True:
            count = min(partial.num_missing, self._stop - self._start)
            if count:
                partial.newest[partial.filled : partial.filled + count] = self._chunk[self._start : self._start + count]
                partial.filled += count
                self._start += count
            if partial.num_missing:
                return None
            if not partial.begin_next():
                self._partial = None
                return partial.message, partial.pieces[1:]

    def shut_down(self) -> None:
        """End both directions; a waiting `receive` raises ChannelClosed. `close` is still to come."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and let go of the socket."""
        self.shut_down()
        self.socket.close()


class _Partial:
    """A frame whose rest has yet to come: its body, then its buffers, one after the other. `newest` is being filled."""

    def __init__(self, with_buffers: bool, body_bytes: int) -> None:
        self.message: Any = None
        self.pieces: list[bytearray] = [bytearray(body_bytes)]
        self.filled = 0
        self._with_buffers = with_buffers
        self._sizes: list[int] = []

    @property
    def newest(self) -> bytearray:
        return self.pieces[-1]

    @property
    def num_missing(self) -> int:
        """Bytes of the piece that is being filled."""
        return len(self.pieces[-1]) - self.filled

    def begin_next(self) -> bool:
        """Go on to the next piece, behind one that is whole; False when there is none. Raises ValueError."""
        if len(self.pieces) == 1:
            self._read_body()
        if len(self.pieces) > len(self._sizes):
            return False
        size = self._sizes[len(self.pieces) - 1]
        if not isinstance(size, int) or not 0 <= size <= MAX_BUFFER_BYTES:
            raise ValueError(f"a buffer of {size!r} bytes; expected at most {MAX_BUFFER_BYTES}")
        self.pieces.append(bytearray(size))
        self.filled = 0
        return True

    def _read_body(self) -> None:
        body = msgpack.unpackb(self.pieces[0], strict_map_key=False)
        if not self._with_buffers:
            self.message = body
        elif isinstance(body, list) and len(body) == 2 and isinstance(body[1], list):
            self.message, self._sizes = body
        else:
            raise ValueError("a frame with buffers: expected [message, sizes]")


class AsyncChannel:
    """The asyncio end of a channel without buffers. Build with `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, host: str, port: int, token: str) -> "AsyncChannel":
        """Connect and introduce ourselves. Raises OSError."""
        reader, writer = await asyncio.open_connection(host, port)
        channel = cls(reader, writer)
        channel.send({"token": token})
        return channel

    def send(self, message: Any) -> None:
        """Queue a message for sending. Raises ChannelClosed when the connection is closing."""
        if self._writer.is_closing():
            raise ChannelClosed("connection closed")
        self._writer.write(encode(message))

    async def receive(self) -> Any:
        """The next message. Raises ChannelClosed at the end."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            return msgpack.unpackb(await self._reader.readexactly(frame_length(head)), strict_map_key=False)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


def encode(message: Any) -> bytes:
    """One frame without buffers."""
    body = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def frame_parts(message: Any, buffers: Sequence[memoryview] = ()) -> list[memoryview]:
    """One frame as the pieces of memory that go out one after the other; buffers are not copied."""
    if not buffers:
        return [memoryview(encode(message))]
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    body = msgpack.packb([message, [view.nbytes for view in views]])
    return [memoryview(_LENGTH.pack(len(body) | _WITH_BUFFERS) + body), *[view for view in views if view.nbytes]]


def frame_length(head: bytes) -> int:
    """Bytes that follow. Raises ValueError beyond MAX_FRAME_BYTES."""
    return _checked(_LENGTH.unpack(head)[0])


def _checked(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; expected at most {MAX_FRAME_BYTES}")
    return length


def _unix_server(path: str) -> socket.socket:
    if len(os.fsencode(path)) > _LARGEST_UNIX_PATH:
        raise OSError(
            f"Unix socket {path!r}: expected a path of at most {_LARGEST_UNIX_PATH} bytes, got {len(os.fsencode(path))}"
        )
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def _watch_for_silence(peer: socket.socket) -> None:
    """A host that disappears says nothing: let the kernel probe an idle connection, and give up on bytes that nobody
    acknowledges. (A process that hangs still acknowledges; that is for deadlines to find.)"""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_HOST_S // 4), ("TCP_KEEPINTVL", _SILENT_HOST_S // 4), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * _SILENT_HOST_S),
    ):  # fmt: skip
        option = getattr(socket, name, None)  # not on every system
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
