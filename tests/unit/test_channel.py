"""Frames with and without buffers over both kinds of socket, and the writer that never blocks."""

import asyncio
import select
import threading

import msgpack
import pytest
import torch

from dflash2_ray.runtime.channel import AsyncChannel, Channel, ChannelClosed, Listener, frame_parts
from dflash2_ray.runtime.frame_writer import FrameWriter


@pytest.fixture(params=["tcp", "unix"])
def pair(request, tmp_path):
    """(connected end, accepted end, listener)."""
    listener = Listener("127.0.0.1", "secret", path=str(tmp_path / "s") if request.param == "unix" else None)
    near = Channel.connect(listener.address, 10.0)
    far = listener.accept()
    near.set_timeout(None)
    yield near, far, listener
    for one in (near, far, listener):
        one.close()


def test_messages_and_buffers(pair):
    near, far, _ = pair
    big = memoryview(bytearray(range(256)) * 20_000)
    sender = threading.Thread(
        target=lambda: [
            near.send({"n": 1}),
            near.send([2, "two"], [big, memoryview(b""), memoryview(b"xyz")]),
            near.send(3),
        ]
    )
    sender.start()
    assert far.receive() == {"n": 1}
    message, buffers = far.receive_frame()
    assert message == [2, "two"]
    assert [bytes(one) for one in buffers] == [bytes(big), b"", b"xyz"]
    assert far.receive_frame() == (3, [])
    sender.join(10)
    far.send({"back": None})
    assert near.receive() == {"back": None}


def test_what_has_arrived_is_taken_without_waiting(pair):
    """Byte by byte, then several frames at once: a frame is there when its last byte is, and the end behind the last frame."""
    near, far, _ = pair
    big = bytes(range(256)) * 1000
    packed = b"".join(frame_parts({"n": 1}, [memoryview(b""), memoryview(b"xyz")]))
    assert far.arrived_frame() is None
    for index in range(len(packed)):
        near.socket.sendall(packed[index : index + 1])
        select.select([far.socket], [], [], 10.0)
        assert (far.arrived_frame() is None) == (index < len(packed) - 1)
    sender = threading.Thread(
        target=lambda: (near.send("first", [memoryview(big), memoryview(b"tail")]), near.send("second"), near.close())
    )
    sender.start()
    got = []
    while len(got) < 2:
        select.select([far.socket], [], [], 10.0)
        while len(got) < 2 and (frame := far.arrived_frame()) is not None:
            got.append((frame[0], [bytes(one) for one in frame[1]]))
    assert got == [("first", [big, b"tail"]), ("second", [])]
    sender.join(10)
    with pytest.raises(ChannelClosed):
        far.arrived_frame()


def test_buffers_where_none_are_expected(pair):
    near, far, _ = pair
    near.send("x", [memoryview(b"y")])
    with pytest.raises(ValueError, match="1 buffers"):
        far.receive()


@pytest.mark.parametrize("body", [["x"], ["x", [-1]], ["x", [1 << 40]], ["x", ["1"]], {"x": 1}])
def test_broken_buffer_frames(pair, body):
    near, far, _ = pair
    packed = msgpack.packb(body)
    near.socket.sendall((len(packed) | 1 << 31).to_bytes(4, "little") + packed)
    with pytest.raises(ValueError, match="buffer"):
        far.receive_frame()


def test_end_of_stream(pair):
    near, far, _ = pair
    near.socket.sendall(frame_parts("x", [memoryview(b"12345678")])[0])  # the buffer never comes
    near.close()
    with pytest.raises(ChannelClosed):
        far.receive_frame()
    near.close()


def test_receive_timeout(pair):
    near, _, _ = pair
    near.set_timeout(0.01)
    with pytest.raises(ChannelClosed):
        near.receive()


def test_strangers_are_turned_away(pair):
    _, _, listener = pair
    stranger = Channel.connect(listener.address | {"token": "guess"}, 10.0)
    accepted = []
    door = threading.Thread(target=lambda: accepted.append(listener.accept()))
    door.start()
    with pytest.raises(ChannelClosed):
        stranger.receive()
    friend = Channel.connect(listener.address, 10.0)
    door.join(10)
    friend.send("hello")
    assert accepted[0].receive() == "hello"
    for one in (stranger, friend, accepted[0]):
        one.close()


def test_closing_wakes_who_waits(pair):
    near, _, listener = pair
    ended = []

    def wait(call, kind):
        try:
            call()
        except kind:
            ended.append(kind)

    threads = [
        threading.Thread(target=wait, args=one) for one in ((listener.accept, OSError), (near.receive, ChannelClosed))
    ]
    for thread in threads:
        thread.start()
    listener.close()
    near.close()
    for thread in threads:
        thread.join(10)
    assert set(ended) == {OSError, ChannelClosed}


def test_unix_paths(tmp_path):
    with pytest.raises(OSError, match="at most 107 bytes, got"):
        Listener("", "secret", path=str(tmp_path / ("x" * 120)))
    path = tmp_path / "s"
    first = Listener("", "secret", path=str(path))
    with pytest.raises(OSError, match="in use"):
        Listener("", "secret", path=str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    assert not path.exists()
    Listener("", "secret", path=str(path)).close()


def test_asyncio_end():
    listener = Listener("127.0.0.1", "secret")

    async def talk():
        channel = await AsyncChannel.connect("127.0.0.1", listener.port, "secret")
        far = await asyncio.to_thread(listener.accept)
        channel.send({"a": 1})
        assert await asyncio.to_thread(far.receive) == {"a": 1}
        await asyncio.to_thread(far.send, {"b": 2})
        assert await channel.receive() == {"b": 2}
        await asyncio.to_thread(far.send, "x", [memoryview(b"y")])
        with pytest.raises(ValueError, match="at most"):  # this end takes no buffers
            await channel.receive()
        channel.close()
        far.close()

    asyncio.run(talk())
    listener.close()


# ---- the writer -------------------------------------------------------------------------------------------------------


class HeldLane:
    """A lane whose sends wait for `go`."""

    device = "cpu"

    def __init__(self):
        self.go, self.began, self.sent = threading.Event(), threading.Event(), []

    def send(self, tensor):
        self.began.set()
        assert self.go.wait(10)
        self.sent.append(tensor)

    def close(self):
        self.go.set()


def test_writer_keeps_order_behind_a_full_socket(pair):
    near, far, _ = pair
    failures = []
    writer = FrameWriter(near, max_queued_bytes=1 << 30, on_failure=failures.append)
    chunk = memoryview(bytes(300_000))
    for number in range(40):  # far more than a socket holds, before anybody reads
        assert writer.put({"n": number}, [chunk] * (number % 3))
    assert writer.queued_bytes > 0
    got = [far.receive_frame() for _ in range(40)]
    assert [message["n"] for message, _ in got] == list(range(40))
    assert [len(buffers) for _, buffers in got] == [number % 3 for number in range(40)]
    writer.close()
    assert failures == []


def test_writer_bounds_what_waits(pair):
    near, far, _ = pair
    writer = FrameWriter(near, max_queued_bytes=100_000, on_failure=lambda reason: None)
    big = memoryview(bytes(16_000_000))
    assert writer.put("first", [big])  # one frame of any size
    assert not writer.put("second", [big])
    assert far.receive_frame()[0] == "first"
    assert writer.put("third")
    assert far.receive() == "third"
    writer.close()
    with pytest.raises(ChannelClosed):
        writer.put("fourth")


def test_writer_sends_tensors_in_their_place(pair):
    near, far, _ = pair
    lane = HeldLane()
    writer = FrameWriter(near, max_queued_bytes=1 << 20, on_failure=lambda reason: None, lane=lane)
    tensor = torch.arange(4)
    writer.put("announced", tensors=[tensor])
    assert far.receive() == "announced"
    assert lane.began.wait(10)
    writer.put("behind")  # must not overtake, so it waits
    assert writer.queued_bytes > tensor.nbytes
    lane.go.set()
    assert far.receive() == "behind"
    assert lane.sent[0] is tensor
    writer.close()


def test_writer_reports_a_peer_that_left(pair):
    near, far, _ = pair
    failed = threading.Event()
    writer = FrameWriter(near, max_queued_bytes=1 << 30, on_failure=lambda reason: failed.set())
    writer.put("x", [memoryview(bytes(16_000_000))])
    far.close()
    assert failed.wait(10)
    with pytest.raises(ChannelClosed):
        writer.put("y")
