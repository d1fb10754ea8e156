"""Lines between a unit and its fronts, over real sockets: what is taken over comes once and in order, what cannot be goes by the stream."""

import asyncio
import socket

import pytest

from dflash2_ray.core import wire
from dflash2_ray.engine.delta_line import LineServer, Mailbox
from dflash2_ray.engine.front_lines import Inbox, Lines
from dflash2_ray.errors import UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

HOST = "127.0.0.1"


class Unit:
    """The door of a unit, with mailboxes by request."""

    def __init__(self):
        self.boxes, self.items, self.stopped, self.gone = {}, [], [], asyncio.Queue()
        self.notice, self.refused = None, asyncio.Queue()
        stopped = lambda name, num_tokens: self.stopped.append((name, num_tokens))  # noqa: E731
        self.server = LineServer(self.take, self.gone.put_nowait, stopped, self.refused.put_nowait, lambda: self.notice)

    def open(self, name):
        box = self.boxes[name] = Mailbox(name, wire.ends, lambda: self.items.append(name))
        return box

    def take(self, name, line):
        return name in self.boxes and self.boxes[name].go_by(line)


def over_a_line(work):
    async def run():
        unit, lines = Unit(), Lines()
        await unit.server.start(HOST, "unit-1")
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
        inbox = await lines.take(unit.server.address, "a")
        for at in range(2, 5):
            box.put({"at": at})
        box.put({"at": 5, "finish_reason": "stop"})
        assert [item["at"] for item in await inbox.take(60.0)] == list(range(6))
        assert (await box.get())["at"] == 5
        assert box.waiting() == []
        assert unit.items.count("a") >= 6

    over_a_line(work)


def test_one_line_for_all_requests_and_items_of_those_that_left_are_dropped():
    async def work(unit, lines):
        boxes = {name: unit.open(name) for name in "abc"}
        inboxes = {name: await lines.take(unit.server.address, name) for name in "abc"}
        assert len({id(box.line) for box in boxes.values()}) == 1
        lines.leave(unit.server.address, "b")
        for name in "abc":
            boxes[name].put({"of": name})
        assert [await inboxes[name].take() for name in "ca"] == [[{"of": "c"}], [{"of": "a"}]]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inboxes["b"].take(), 0)

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
        inbox = await lines.take(unit.server.address, "a")
        unit.server.close()
        assert await inbox.take() == [None]
        other = Unit()
        await other.server.start(HOST, "unit-2")
        other.open("a").put({"at": 7})
        again = await lines.take(other.server.address, "a")
        assert await again.take() == [{"at": 7}]
        other.server.close()

    over_a_line(work)


def test_a_front_that_goes_away_is_told_to_its_requests():
    async def work(unit, lines):
        box = unit.open("a")
        address = unit.server.address
        channel = await AsyncChannel.connect(address["host"], address["port"], address["token"])
        channel.send({"take": "a"})
        assert await channel.receive() == {"full": None}
        assert (await channel.receive())["items"] == [["a", {"taken": True}]]
        channel.close()
        assert await unit.gone.get() is box.line
        box.hang_up()
        with pytest.raises(UnitLost):
            await box.get()

    over_a_line(work)


@pytest.mark.parametrize("last", [None, {"finish_reason": "length"}, {"refused": {}}])
def test_what_is_held_waits_for_more_but_not_at_its_end(last):
    async def run():
        inbox = Inbox()
        inbox.put({"at": 0})
        assert await inbox.take(0.0) == [{"at": 0}]
        held = asyncio.create_task(inbox.take(600.0))
        inbox.put({"at": 1})
        await asyncio.sleep(0)
        inbox.put({"at": 2})
        await asyncio.sleep(0)
        assert not held.done()
        inbox.put(last)
        assert await asyncio.wait_for(held, 20) == [{"at": 1}, {"at": 2}, last]
        inbox.put({"at": 3})
        assert await inbox.take(600.0) == [{"at": 3}]

    asyncio.run(run())


def test_what_is_held_goes_after_its_time():
    async def run():
        inbox = Inbox()
        inbox.put({"at": 0})
        assert await inbox.take(1e-3) == [{"at": 0}]

    asyncio.run(run())


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


def test_a_front_refuses_for_a_full_unit_and_tells_it():
    async def work(unit, lines):
        async def in_order(name):
            """Behind all that the unit has sent so far."""
            unit.open(name)
            await lines.take(unit.server.address, name)

        unit.notice = {"message": "full", "interval_s": 3.0, "num_refused": 0}
        assert lines.refuse(["unit-1"]) is None  # not heard of yet
        await in_order("a")
        assert lines.refuse(["unit-1"]).retry_after_s == 3.0
        assert lines.refuse(["unit-1"]).retry_after_s == 6.0
        assert lines.refuse(["unit-1", "unit-2"]) is None
        assert [await unit.refused.get() for _ in range(2)] == [1, 1]
        unit.notice = None
        unit.server.tell()
        await in_order("b")
        assert lines.refuse(["unit-1"]) is None
        unit.notice = {"message": "full", "interval_s": 3.0, "num_refused": 0}
        unit.server.tell()
        unit.open("c")
        inbox = await lines.take(unit.server.address, "c")
        assert lines.refuse(["unit-1"]) is not None
        unit.server.close()
        assert await inbox.take() == [None]
        assert lines.refuse(["unit-1"]) is None
        assert unit.refused.qsize() <= 1

    over_a_line(work)


@pytest.mark.parametrize("hello", [{"token": "wrong"}, {"take": "a"}, "x", 5])
def test_strangers_are_turned_away(hello):
    async def work(unit, lines):
        unit.open("a")
        reader, writer = await asyncio.open_connection(HOST, unit.server.address["port"])
        channel = AsyncChannel(reader, writer)
        channel.send(hello)
        channel.send({"take": "a"})
        unit.server.tell()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        assert unit.boxes["a"].line is None

    over_a_line(work)


def test_an_unreachable_unit_is_left_to_the_stream_and_not_tried_again_at_once():
    async def work(unit, lines):
        with socket.create_server((HOST, 0)) as closed:
            port = closed.getsockname()[1]
        nowhere = {"host": HOST, "port": port, "token": "t", "unit": "unit-1"}
        assert await lines.take(nowhere, "a") is None
        with socket.create_server((HOST, port)) as now_open:
            now_open.settimeout(0.0)
            assert await lines.take(nowhere, "a") is None
            with pytest.raises(BlockingIOError):
                now_open.accept()

    over_a_line(work)
