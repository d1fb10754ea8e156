"""Framed messages over a TCP socket: a 4-byte length, then msgpack. Blocking for loops, asyncio for servers.

Each side proves itself with the channel's token in its first frame. Plain values only. It must not know what they mean.
"""

import asyncio
import contextlib
import hmac
import socket
import struct
import threading
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024


class ChannelClosed(Exception):
    """The other side went away."""


class Listener:
    """A listening socket on a free port. `port` is where; `accept` waits for one peer that knows the token."""

    def __init__(self, host: str, token: str) -> None:
        self._socket = socket.create_server((host, 0))
        self._token = token
        self.port: int = self._socket.getsockname()[1]

    def accept(self) -> "Channel":
        """The next peer with the right token; others are turned away. Raises OSError once closed."""
        while True:
            peer, _ = self._socket.accept()
            peer.settimeout(10.0)  # a stranger that says nothing must not block the door
            channel = Channel(peer)
            try:
                hello = channel.receive()
            except (ChannelClosed, OSError, ValueError):
                channel.close()
                continue
            if isinstance(hello, dict) and hmac.compare_digest(str(hello.get("token", "")), self._token):
                peer.settimeout(None)
                return channel
            channel.close()

    def close(self) -> None:
        """Stop listening; a waiting `accept` raises OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Channel:
    """One connection; `send` may be called from several threads, `receive` from one."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = peer
        self._file = peer.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises ChannelClosed when the other side is gone."""
        try:
            with self._lock:
                self._socket.sendall(encode(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Any:
        """The next message. Raises ChannelClosed at the end, ValueError for a frame that is none."""
        head = self._read(_LENGTH.size)
        return msgpack.unpackb(self._read(frame_length(head)), strict_map_key=False)

    def _read(self, count: int) -> bytes:
        try:
            data = self._file.read(count)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if len(data) < count:
            raise ChannelClosed("end of stream")
        return data

    def close(self) -> None:
        """Close both directions."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class AsyncChannel:
    """The asyncio end of a channel. Build with `connect`."""

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
    """One frame."""
    body = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Bytes that follow. Raises ValueError beyond MAX_FRAME_BYTES."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; expected at most {MAX_FRAME_BYTES}")
    return int(length)
