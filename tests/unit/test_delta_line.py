"""Lines between a unit and its fronts, over real sockets: what is taken over comes once and in order, what cannot be goes by the stream."""

import asyncio
import socket

import pytest

from dflash2_ray.engine.delta_line import Lines, LineServer, Mailbox
from dflash2_ray.errors import UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

HOST = "127.0.0.1"


def ends(item):
    return item.get("last", False)


class Unit:
    """The door of a unit, with mailboxes by request."""

    def __init__(self):
        self.boxes, self.items, self.stopped, self.gone = {}, [], [], asyncio.Queue()
        self.server = LineServer(self.take, self.gone.put_nowait, lambda name, num_tokens: self.stopped.append((name, num_tokens)))

    def open(self, name):
        box = self.boxes[name] = Mailbox(name, ends, lambda: self.items.append(name))
        return box

    def take(self, name, line):
        return name in self.boxes and self.boxes[name].go_by(line)


def over_a_line(work):
    async def run():
        unit, lines = Unit(), Lines()
        await unit.server.start(HOST)
        try:
            await asyncio.wait_for(work(unit, lines), 20)
        finally:
            unit.server.close()

    asyncio.run(run())


def test_what_waited_comes_first_and_the_end_comes_both_ways():
    async def work(unit, lines):
        box = unit.open("a")
        box.put({"at": 0})
        box.put({"at": 1})
        queue = await lines.take(unit.server.address, "a")
        for at in range(2, 5):
            box.put({"at": at})
        box.put({"at": 5, "last": True})
        assert [(await queue.get())["at"] for _ in range(6)] == list(range(6))
        assert (await box.get())["at"] == 5
        assert box.waiting() == []
        assert unit.items.count("a") >= 6

    over_a_line(work)


def test_one_line_for_all_requests_and_items_of_those_that_left_are_dropped():
    async def work(unit, lines):
        boxes = {name: unit.open(name) for name in "abc"}
        queues = {name: await lines.take(unit.server.address, name) for name in "abc"}
        assert len({id(box.line) for box in boxes.values()}) == 1
        lines.leave(unit.server.address, "b")
        for name in "abc":
            boxes[name].put({"of": name})
        assert (await queues["c"].get())["of"] == "c"
        assert queues["a"].get_nowait()["of"] == "a"
        assert queues["b"].empty()

    over_a_line(work)


def test_too_late_or_unknown_goes_by_the_stream():
    async def work(unit, lines):
        box = unit.open("late")
        await box.decided(0.0)
        box.put({"at": 0})
        assert await lines.take(unit.server.address, "late") is None
        assert await lines.take(unit.server.address, "nobody") is None
        assert (await box.get())["at"] == 0
        box = unit.open("in time")
        waiting = asyncio.create_task(box.decided(20.0))
        assert await lines.take(unit.server.address, "in time") is not None
        await waiting

    over_a_line(work)


def test_a_unit_that_hangs_up_ends_every_stream_and_a_new_line_is_made():
    async def work(unit, lines):
        unit.open("a")
        queue = await lines.take(unit.server.address, "a")
        unit.server.close()
        assert await queue.get() is None
        other = Unit()
        await other.server.start(HOST)
        other.open("a").put({"at": 7})
        again = await lines.take(other.server.address, "a")
        assert (await again.get())["at"] == 7
        other.server.close()

    over_a_line(work)


def test_a_front_that_goes_away_is_told_to_its_requests():
    async def work(unit, lines):
        box = unit.open("a")
        channel = await AsyncChannel.connect(**unit.server.address)
        channel.send({"take": "a"})
        assert (await channel.receive())["items"] == [["a", {"taken": True}]]
        channel.close()
        assert await unit.gone.get() is box.line
        box.hang_up()
        with pytest.raises(UnitLost):
            await box.get()

    over_a_line(work)


def test_hanging_up_behind_an_item_is_not_lost():
    async def work(unit, lines):
        box = unit.open("a")
        box.put({"at": 0})
        box.put({"at": 1})
        box.hang_up()
        assert [await box.get(), *box.waiting()] == [{"at": 0}, {"at": 1}]
        with pytest.raises(UnitLost):
            await box.get()

    over_a_line(work)


@pytest.mark.parametrize("hello", [{"token": "wrong"}, {"take": "a"}, "x", 5])
def test_strangers_are_turned_away(hello):
    async def work(unit, lines):
        unit.open("a")
        reader, writer = await asyncio.open_connection(HOST, unit.server.address["port"])
        channel = AsyncChannel(reader, writer)
        channel.send(hello)
        channel.send({"take": "a"})
        with pytest.raises(ChannelClosed):
            await channel.receive()
        assert unit.boxes["a"].line is None

    over_a_line(work)


def test_an_unreachable_unit_is_left_to_the_stream_and_not_tried_again_at_once():
    async def work(unit, lines):
        with socket.create_server((HOST, 0)) as closed:
            port = closed.getsockname()[1]
        nowhere = {"host": HOST, "port": port, "token": "t"}
        assert await lines.take(nowhere, "a") is None
        with socket.create_server((HOST, port)) as now_open:
            now_open.settimeout(0.0)
            assert await lines.take(nowhere, "a") is None
            with pytest.raises(BlockingIOError):
                now_open.accept()

    over_a_line(work)
