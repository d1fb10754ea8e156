"""The target's end against a scripted drafter: whatever comes back late, twice, in another order, stale or bent is dropped and
counted, and no step waits longer than its deadline. Also the server's end, the log behind a replay, and the deadline itself.
"""

import queue
import random
import threading
from collections import Counter

import pytest
import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Proposal, Rows, RowSpan, Wanted, propose
from dflash2_ray.errors import ConfigError
from dflash2_ray.runtime.channel import Channel, ChannelClosed, Listener
from dflash2_ray.runtime.context_log import ContextLog
from dflash2_ray.runtime.draft_deadline import DraftDeadline
from dflash2_ray.runtime.draft_link import RemoteDraftPort
from dflash2_ray.runtime.draft_wire import (
    VERSION,
    Answer,
    WireError,
    head,
    pack_answer,
    pack_ask,
    pack_step,
    unpack_answer,
)
from dflash2_ray.runtime.drafter_server import DrafterServer

H, PATIENCE_S = 4, 30.0


class ScriptedPeer:
    """A drafter that says what the test says. `frames`: the headers that came, without the handshake's."""

    def __init__(self, path):
        self.listener = Listener("127.0.0.1", "secret", path=path)
        self.address = self.listener.address
        self.frames = queue.SimpleQueue()
        self.ready = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        try:
            while True:
                self.channel = self.listener.accept()
                self.generation = self.channel.receive()["generation"]
                self.channel.send(head("welcome", self.generation, 0))
                threading.Thread(target=self._read, args=(self.channel,), daemon=True).start()
        except OSError:
            pass

    def _read(self, channel):
        try:
            while True:
                self.frames.put(channel.receive_frame()[0])
        except ChannelClosed:
            pass

    def next(self, kind):
        while (header := self.frames.get(timeout=PATIENCE_S))["kind"] != kind:
            pass
        return header

    def answer(self, number, *proposals, settled=None, generation=None, error=None, kind="answer", counters=None):
        names = tuple(p.request_id for p in proposals) if settled is None else settled
        generation = self.generation if generation is None else generation
        frame = pack_answer(Answer(generation, number, names, list(proposals), error, 0.0, counters or {}))
        self.channel.send({**frame.header, "kind": kind}, frame.buffers)

    def answer_counters(self, **counters):
        self.answer(self.next("counters")["number"], kind="counters", counters=counters)

    def close(self):
        self.listener.close()
        if hasattr(self, "channel"):
            self.channel.close()


@pytest.fixture(params=["tcp", "unix"])
def peer(request, tmp_path):
    one = ScriptedPeer(str(tmp_path / "peer.sock") if request.param == "unix" else None)
    yield one
    one.close()


@pytest.fixture
def new_port(peer):
    ports = []

    def build(**options):
        ports.append(RemoteDraftPort(**options))
        ports[-1].connect(peer.address, PATIENCE_S)
        return ports[-1]

    yield build
    for port in ports:
        port.close()


def until(port, condition):
    with port._changed:
        assert port._changed.wait_for(condition, PATIENCE_S)


def own(port, name):
    with port._changed:
        return port._own[name]


def draft(name="a", epoch=0, base_len=5, tokens=(1, 2, 3)):
    return Proposal(name, epoch, base_len, tokens)


def want(name="a", epoch=0, base_len=5, width=3):
    return Wanted(name, epoch, base_len, width)


def rows(name, first, count, epoch=0):
    values = torch.arange(first, first + count).float()[:, None] + 1000 * epoch + torch.zeros(count, H)
    return Rows((RowSpan(name, epoch, first, count),), values)


# ---- answers ----------------------------------------------------------------------------------------------------------


def test_answers_bind_to_what_was_asked(peer, new_port):
    port = new_port()
    port.ask([want("a"), want("b"), want("c"), want("d")])
    number = peer.next("ask")["number"]
    wrong = [draft("a", epoch=1), draft("b", base_len=6), draft("c", tokens=(1, 2, 3, 4)), draft("x")]
    peer.answer(number, *wrong, draft("d"), settled=("a", "b", "c", "d"))
    assert port.collect([want("a"), want("b"), want("c"), want("d")], PATIENCE_S) == [draft("d")]
    assert own(port, "num_late") == 4


def test_delayed_duplicate_and_reordered_answers(peer, new_port):
    port = new_port(hung_after=100)
    port.ask([want("a", base_len=5)])
    assert port.collect([want("a", base_len=5)], 0.0) == []
    port.ask([want("a", base_len=6), want("b")])
    first, second = peer.next("ask")["number"], peer.next("ask")["number"]
    peer.answer(second, draft("a", base_len=6), draft("b"))
    peer.answer(second, draft("a", base_len=6), draft("b"))
    peer.answer(first, draft("a", base_len=5))
    until(port, lambda: port._own["num_late"] == 3)
    assert port.collect([want("a", base_len=6), want("b")], PATIENCE_S) == [draft("a", base_len=6), draft("b")]
    assert port.collect([want("a", base_len=6), want("b")], PATIENCE_S) == []  # given once
    assert (own(port, "num_late"), own(port, "missing")) == (3, 1)


def test_an_older_answer_does_not_stand_in_for_a_newer_ask(peer, new_port):
    """Same request, epoch and length, asked again: only the answer to the newer ask counts."""
    port = new_port()
    port.ask([want("a", width=2)])
    port.ask([want("a", width=3)])
    first, second = peer.next("ask")["number"], peer.next("ask")["number"]
    peer.answer(first, draft("a", tokens=(9, 9)))
    peer.answer(second, draft("a"))
    assert port.collect([want("a")], PATIENCE_S) == [draft("a")]
    assert own(port, "num_late") == 1


def test_another_generation(peer, new_port):
    port = new_port()
    port.ask([want()])
    number = peer.next("ask")["number"]
    peer.answer(number, draft(tokens=(9, 9, 9)), generation=peer.generation - 1)
    peer.answer(number, draft())
    assert port.collect([want()], PATIENCE_S) == [draft()]
    assert own(port, "num_late") == 1


def test_two_asks_in_flight(peer, new_port):
    """Two micro-batches: each is collected for itself, whichever is answered first."""
    port = new_port()
    port.ask([want("a")])
    port.ask([want("b")])
    first, second = peer.next("ask")["number"], peer.next("ask")["number"]
    peer.answer(second, draft("b"))
    assert port.collect([want("b")], PATIENCE_S) == [draft("b")]
    peer.answer(first, draft("a"))
    assert port.collect([want("a")], PATIENCE_S) == [draft("a")]
    assert own(port, "missing") == 0


def test_settled_without_a_proposal_is_not_waited_for(peer, new_port):
    port = new_port()
    port.ask([want("a"), want("b")])
    peer.answer(peer.next("ask")["number"], draft("b"), settled=("a", "b"))
    assert port.collect([want("a"), want("b")], 10_000.0) == [draft("b")]
    port.ask([want("a")])
    peer.answer(peer.next("ask")["number"], settled=("a",), error="it broke")
    assert port.collect([want("a")], 10_000.0) == []
    assert (own(port, "num_failed_asks"), own(port, "missing")) == (1, 0)


# ---- deadlines and silence --------------------------------------------------------------------------------------------


def test_hung_needs_silence_and_time(peer, new_port):
    now = [100.0]
    port = new_port(hung_after=2, hung_after_s=5.0, clock=lambda: now[0])
    for base_len in (5, 6):
        port.ask([want(base_len=base_len)])
        assert port.collect([want(base_len=base_len)], 0.0) == []
    assert port.suspect is None  # nothing is waited for any more, but it may be busy with a long prompt
    port.ask([want(base_len=7)])
    assert port.collect([want(base_len=7)], 10_000.0) == []
    now[0] += 5.0
    assert port.suspect == "hung"
    first, second = peer.next("ask")["number"], peer.next("ask")["number"]
    now[0] += 1.0
    peer.answer(second, draft(base_len=6))
    until(port, lambda: port.suspect is None)
    assert list(port.timings) == [(1, 3, 6.0)]
    port.ask([want(base_len=8)])
    assert peer.next("ask")["number"] > second > first
    port.ask([want(base_len=8)])
    assert own(port, "num_late") == 1


def test_a_sign_of_life_is_no_silence(peer, new_port):
    """An answer that comes while another is waited for: the other is late, but nobody is hung."""
    now, waiting = [0.0], threading.Event()

    def clock():
        waiting.set()
        return now[0]

    port = new_port(hung_after=1, hung_after_s=0.0, clock=clock)
    port.ask([want("a")])
    port.ask([want("b")])
    first = peer.next("ask")["number"]
    waiting.clear()
    waiter = threading.Thread(target=lambda: port.collect([want("b")], 0.2))
    waiter.start()
    assert waiting.wait(PATIENCE_S)
    peer.answer(first, draft("a"))
    until(port, lambda: len(port.timings) == 1)
    now[0] += 0.2
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()
    assert port.suspect is None
    assert own(port, "missing") == 1


def test_a_new_connection_forgets_the_silence(peer, new_port):
    port = new_port(hung_after=1, hung_after_s=0.0)
    port.ask([want()])
    assert port.collect([want()], 0.0) == []
    assert port.suspect == "hung"
    port.connect(peer.address, PATIENCE_S)
    assert port.suspect is None
    peer.next("ask")
    port.ask([want()])
    peer.answer(peer.next("ask")["number"], draft())
    assert port.collect([want()], PATIENCE_S) == [draft()]
    assert (own(port, "num_reconnects"), own(port, "num_lost")) == (1, 0)


def test_a_peer_that_leaves_ends_the_wait(peer, new_port):
    port = new_port()
    port.ask([want()])
    peer.next("ask")
    waiter = threading.Thread(target=peer.channel.close)
    waiter.start()
    assert port.collect([want()], 10_000.0) == []
    assert (port.suspect, port.connected) == ("lost", False)
    port.send([Close("a", 0)])
    assert propose(port, [want()], 10_000.0) == []
    assert port.counters()["num_lost"] == 1


def test_counters_of_lost_drafters_add_up(peer, new_port):
    port = new_port(deadline=DraftDeadline(30.0))
    answering = threading.Thread(target=peer.answer_counters, kwargs={"stale_base": 2})
    answering.start()
    assert port.counters()["stale_base"] == 2
    port.connect(peer.address, PATIENCE_S)
    answering = threading.Thread(target=peer.answer_counters, kwargs={"stale_base": 1, "stale_epoch": 4})
    answering.start()
    counters = port.counters()
    assert (counters["stale_base"], counters["stale_epoch"]) == (3, 4)


@pytest.mark.parametrize(
    "garbage", [{"version": VERSION + 1}, ["x"], {"version": VERSION, "generation": 1, "number": 1, "kind": "answer"}]
)
def test_garbage_loses_the_drafter(peer, new_port, garbage):
    port = new_port()
    port.ask([want()])
    peer.next("ask")
    peer.channel.send(garbage)
    assert port.collect([want()], 10_000.0) == []
    assert port.suspect == "lost"


def test_transports_are_checked():
    with pytest.raises(ConfigError, match="expected one of socket, gloo, nccl, got 'pigeon'"):
        RemoteDraftPort(transport="pigeon")
    with pytest.raises(ConfigError, match="no GPU or no NCCL"):
        RemoteDraftPort(transport="nccl")


def test_a_drafter_that_does_not_come_to_the_group(peer):
    port = RemoteDraftPort(transport="gloo", group_timeout_s=0.3)
    with pytest.raises(ChannelClosed, match="transport gloo: the drafter did not come to the group"):
        port.connect(peer.address, PATIENCE_S)
    assert not port.connected
    port.close()


def test_closed(peer, new_port):
    port = new_port()
    port.close()
    port.send([Open("a", 0, 0.0, 0), rows("a", 0, 3)])
    assert propose(port, [want()], 10_000.0) == []
    with pytest.raises(ChannelClosed, match="closed"):
        port.connect(peer.address, PATIENCE_S)


def test_deadline():
    deadline = DraftDeadline(floor_s=0.02, first_s=2.0)
    assert deadline.limit_s == 2.0
    deadline.observe(0.1)
    assert deadline.limit_s == pytest.approx(0.3)
    deadline.observe(1.1)
    assert deadline.limit_s == pytest.approx(0.9)
    for _ in range(100):
        deadline.observe(0.001)
    assert deadline.limit_s == 0.02
    deadline.restart()
    assert deadline.limit_s == 2.0
    fixed = DraftDeadline(0.05)
    fixed.observe(10.0)
    assert fixed.limit_s == 0.05


# ---- replay -----------------------------------------------------------------------------------------------------------


def test_replay_is_bounded_and_yields_to_a_drafter_that_takes_nothing(peer):
    """Each call sends at most its share; a request in the middle of it is neither asked for nor told of twice."""
    port = RemoteDraftPort(replay_bytes=10 * H * 4)
    port.send([Open("a", 0, 0.0, 0), rows("a", 0, 25), Commit("a", 0, 25, 7)])
    port.send([Open("gone", 0, 0.0, 0), rows("gone", 0, 25), Commit("gone", 0, 25, 7), Close("gone", 0)])
    port.connect(peer.address, PATIENCE_S)
    port.ask([want(base_len=25)])
    assert peer.next("step")["messages"] == [
        ["open", "a", 0, 0.0, 0, False, 0], ["rows", [["a", 0, 0, 10]], "float32", [10, H], False], ["commit", "a", 0, 10, None],
    ]  # fmt: skip
    port.send([Rows((RowSpan("a", 0, 25, 2), RowSpan("b", 0, 0, 1)), torch.zeros(3, H)), Commit("a", 0, 27, 9)])
    assert peer.next("step")["messages"] == [["rows", [["b", 0, 0, 1]], "float32", [1, H], False]]
    assert peer.next("step")["messages"][1] == ["commit", "a", 0, 20, None]
    assert port.num_replaying == 1
    port.ask([want(base_len=27)])
    assert peer.next("step")["messages"] == [
        ["rows", [["a", 0, 20, 7]], "float32", [7, H], False],
        ["commit", "a", 0, 27, 9],
    ]
    assert port.num_replaying == 0
    assert peer.next("ask")["wanted"] == [["a", 0, 27, 3]]
    assert own(port, "missing") == 1
    port.close()


def test_a_request_that_begins_behind_many_cached_rows_is_told_bit_by_bit(peer):
    """One frame of them would hold up everybody's drafts; its neighbours' messages go out at once."""
    port = RemoteDraftPort(replay_bytes=10 * H * 4, whole_bytes=15 * H * 4)
    port.connect(peer.address, PATIENCE_S)
    port.send([Open("short", 0, 0.0, 0), rows("short", 0, 15), Commit("short", 0, 15, 7)])
    assert [message[0] for message in peer.next("step")["messages"]] == ["open", "rows", "commit"]
    step = Rows(
        (RowSpan("a", 0, 16, 1), RowSpan("short", 0, 15, 2)), torch.cat([rows("a", 16, 1).rows, torch.zeros(2, H)])
    )
    port.send([Open("a", 0, 0.0, 0), rows("a", 0, 16), step, Commit("a", 0, 17, 7), Commit("short", 0, 17, 9)])
    assert peer.next("step")["messages"] == [
        ["rows", [["short", 0, 15, 2]], "float32", [2, H], False],
        ["commit", "short", 0, 17, 9],
    ]
    assert peer.next("step")["messages"] == [
        ["open", "a", 0, 0.0, 0, False, 0], ["rows", [["a", 0, 0, 10]], "float32", [10, H], False], ["commit", "a", 0, 10, None],
    ]  # fmt: skip
    assert port.num_replaying == 1
    port.ask([want(base_len=17)])  # what is left goes out with it, and it is asked for at once
    assert peer.next("step")["messages"] == [
        ["rows", [["a", 0, 10, 7]], "float32", [7, H], False],
        ["commit", "a", 0, 17, 7],
    ]
    assert peer.next("ask")["wanted"] == [["a", 0, 17, 3]]
    assert own(port, "missing") == 0
    port.close()


def test_replayed_requests_that_begin_again_or_end(peer):
    port = RemoteDraftPort(replay_bytes=H * 4)
    for name in "abc":
        port.send([Open(name, 0, 0.0, 0), rows(name, 0, 3), Commit(name, 0, 3, 7)])
    port.connect(peer.address, PATIENCE_S)
    port.ask([])
    assert peer.next("step")["messages"][-1] == ["commit", "a", 0, 1, None]
    port.send(
        [
            Close("a", 0),
            Close("b", 0),
            Open("c", 1, 0.0, 0),
            rows("c", 0, 2, epoch=1),
            Commit("c", 1, 2, 5),
            Commit("c", 0, 9, 1),
        ]
    )
    kinds = [message[:3] for message in peer.next("step")["messages"]]
    assert kinds == [
        ["close", "a", 0],
        ["open", "c", 1],
        ["rows", [["c", 1, 0, 2]], "float32"],
        ["commit", "c", 1],
        ["commit", "c", 0],
    ]
    assert port.num_replaying == 0
    port.close()


@pytest.mark.parametrize("seed", range(6))
def test_the_log_holds_what_a_drafter_would_know(seed):
    """Random steps, doubled, shuffled and with void rows: length, anchor and rows are those of the committed text."""
    rng = random.Random(seed)
    log, lengths, epochs, anchors = ContextLog(), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), dict.fromkeys("abc")
    begins = dict.fromkeys("abc", 0)
    log.apply([Open(name, 0, 0.0, 0) for name in "abc"])
    for _ in range(200):
        name = rng.choice("abc")
        if rng.random() < 0.03:
            epochs[name] += 1
            begins[name] = lengths[name] = rng.choice([0, 7])
            anchors[name] = None
            log.apply([Open(name, epochs[name], 0.0, 0, first_position=begins[name])])
        epoch, first, count = epochs[name], lengths[name], rng.randint(1, 9)
        parts = [
            rows(name, first, 1, epoch),
            rows(name, first, count, epoch),
            rows(name, first + count, 2, epoch),
            rows(name, 0, 3, epoch + 1),
        ]
        rng.shuffle(parts)
        lengths[name], anchors[name] = first + count, rng.randrange(99)
        messages = [*parts, Commit(name, epoch, lengths[name], anchors[name])]
        log.apply([message for message in messages for _ in range(rng.randint(1, 2))])
    for name in "abc":
        known = log.get(name)
        assert (known.opened.epoch, known.base_len, known.anchor, known.broken) == (
            epochs[name],
            lengths[name],
            anchors[name],
            False,
        )
        if lengths[name] > begins[name]:
            expected = rows(name, begins[name], lengths[name] - begins[name], epochs[name]).rows
            assert torch.equal(known.rows(begins[name], lengths[name]), expected)
    log.apply([rows("a", lengths["a"] + 1, 3, epochs["a"]), Commit("a", epochs["a"], lengths["a"] + 4, 1)])
    assert log.get("a").broken
    log.apply([Close("a", epochs["a"]), Close("b", epochs["b"] - 1)])
    assert list(log) == ["b", "c"]


# ---- the server's end -------------------------------------------------------------------------------------------------


class RecordingRunner:
    """Stands in for `DrafterRunner`. `go`: drafts wait for it."""

    def __init__(self):
        self.counters, self.applied, self.drafted = Counter(), [], queue.SimpleQueue()
        self.go = threading.Event()
        self.go.set()

    def apply(self, messages):
        if any(isinstance(message, Close) and message.request_id == "poison" for message in messages):
            raise IndexError("no such row")
        self.applied.extend(messages)

    def propose(self, wanted):
        self.drafted.put((list(wanted), len(self.applied)))
        assert self.go.wait(PATIENCE_S)
        if any(one.request_id == "poison" for one in wanted):
            raise RuntimeError("out of memory")
        return [Proposal(one.request_id, one.epoch, one.base_len, (1,) * one.width) for one in wanted]

    def close(self):
        self.applied.clear()


@pytest.fixture
def served(tmp_path):
    """(server, runner, connect() → a channel behind the handshake). By a Unix socket: what was sent has arrived."""
    runner = RecordingRunner()
    server = DrafterServer(runner, "secret", path=str(tmp_path / "served.sock"))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    channels = []

    def connect(generation=1):
        channel = Channel.connect(server.address, PATIENCE_S)
        channels.append(channel)
        channel.send(head("hello", generation, 0))
        assert channel.receive()["kind"] == "welcome"
        return channel

    yield server, runner, connect
    runner.go.set()
    server.stop()
    for channel in channels:
        channel.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def put(channel, frame):
    channel.send(frame.header, frame.buffers)


def answered(channel):
    return unpack_answer(*channel.receive_frame())


def test_server_applies_all_before_it_drafts_and_drops_replaced_asks(served):
    _, runner, connect = served
    channel = connect()
    runner.go.clear()
    put(channel, pack_ask([want("x")], 1, 1))
    assert runner.drafted.get(timeout=PATIENCE_S)[0] == [want("x")]  # busy from here on
    put(channel, pack_ask([want("a", base_len=5), want("b")], 1, 2))
    put(channel, pack_step([Commit("a", 0, 6, 1)], 1, 3))
    put(channel, pack_ask([want("a", base_len=6)], 1, 4))
    put(channel, pack_step([Commit("b", 0, 9, 1), Commit("c", 0, 9, 1)], 1, 5))
    put(channel, pack_ask([want("c")], 1, 6))
    put(channel, pack_ask([want("c", width=2)], 1, 7))
    channel.send(head("counters", 1, 8))
    runner.go.set()
    answers = [answered(channel) for _ in range(5)]
    assert [(answer.number, answer.settled) for answer in answers if answer.settled] == [
        (1, ("x",)), (2, ("b",)), (4, ("a",)), (7, ("c",)),
    ]  # fmt: skip
    assert runner.drafted.get(timeout=PATIENCE_S) == ([want("b")], 3)
    assert runner.drafted.get(timeout=PATIENCE_S) == ([want("a", base_len=6)], 3)


def test_server_reports_a_draft_that_fails_and_goes_on(served):
    _, _, connect = served
    channel = connect()
    put(channel, pack_ask([want("poison")], 1, 1))
    answer = answered(channel)
    assert (answer.number, answer.settled, answer.proposals, answer.error) == (
        1,
        ("poison",),
        [],
        "RuntimeError: out of memory",
    )
    assert answer.counters == {"failed_drafts": 1}
    put(channel, pack_ask([want("a")], 1, 2))
    assert [p.request_id for p in answered(channel).proposals] == ["a"]


def test_server_ends_a_connection_whose_contexts_are_half_made(served):
    _, runner, connect = served
    channel = connect()
    put(channel, pack_step([Open("a", 0, 0.0, 0), Close("poison", 0)], 1, 1))
    refused = channel.receive()
    assert refused["kind"] == "refused"
    assert "no such row" in refused["reason"]
    with pytest.raises(ChannelClosed):
        channel.receive()
    put(connect(2), pack_ask([want("a")], 2, 1))
    assert runner.drafted.get(timeout=PATIENCE_S)[0] == [want("a")]


def test_server_begins_anew_with_each_target(served):
    _, runner, connect = served
    first = connect(1)
    put(first, pack_step([Open("a", 0, 0.0, 0)], 1, 1))
    put(first, pack_ask([want("poison")], 1, 2))
    assert answered(first).counters == {"failed_drafts": 1}
    first.close()
    second = connect(7)
    put(second, pack_ask([want("a")], 7, 1))
    answer = answered(second)
    assert (answer.generation, answer.counters) == (7, {})
    assert [runner.drafted.get(timeout=PATIENCE_S)[1] for _ in range(2)] == [1, 0]


def test_server_shows_how_long_it_has_been_busy():
    now = [10.0]
    runner = RecordingRunner()
    runner.go.clear()
    server = DrafterServer(runner, "secret", clock=lambda: now[0])
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    port = RemoteDraftPort()
    port.connect(server.address)
    assert (server.num_steps, server.age_s) == (0, 0.0)
    port.ask([want()])
    runner.drafted.get(timeout=PATIENCE_S)
    now[0] += 42.0
    assert server.age_s == 42.0
    runner.go.set()
    assert [p.token_ids for p in port.collect([want()], PATIENCE_S)] == [(1, 1, 1)]
    port.close()
    server.stop()
    thread.join(PATIENCE_S)
    assert (server.num_steps, server.age_s) == (1, 0.0)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (head("hello", 1, 0) | {"version": VERSION + 1}, f"expected version {VERSION}, got {VERSION + 1}"),
        (head("ask", 1, 0), "expected a hello first, got 'ask'"),
        (head("hello", 1, 0, transport="pigeon"), "got 'pigeon'"),
        (head("hello", 1, 0, transport="gloo"), "store"),
    ],
)
def test_server_turns_strange_targets_away(served, hello, reason):
    server, _, connect = served
    channel = Channel.connect(server.address, PATIENCE_S)
    channel.send(hello)
    reply = channel.receive()
    assert reply["kind"] == "refused"
    assert reason in reply["reason"]
    channel.close()
    put(connect(3), pack_ask([want("a")], 3, 1))


def test_port_of_another_release(served, monkeypatch):
    server, _, _ = served
    port = RemoteDraftPort()
    monkeypatch.setattr(
        "dflash2_ray.runtime.draft_link.head", lambda *args, **more: head(*args, **more) | {"version": 99}
    )
    with pytest.raises(WireError, match="got 99; both sides must run the same release"):
        port.connect(server.address, PATIENCE_S)
    assert not port.connected
    port.close()


def test_a_stopped_server_serves_nobody():
    server = DrafterServer(RecordingRunner(), "secret")
    server.stop()
    assert server.run() == "stopped before a target connected"
    assert server.stopped
