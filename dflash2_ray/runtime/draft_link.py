"""The target's end of a drafter in another process: a `DraftPort` that loses a drafter, waits for none, and warms the next.

Everything that a drafter knows is kept in a log here, so a new one (`connect`, at any time, from any thread) is told again bit by
bit with the traffic of later steps, and a request is asked for once it has been told in full. The step loop never waits to
send: a writer does in the background, and a drafter that takes nothing off its connection is given up. It reads its drafts
itself while it waits for them; a thread reads at other times. Waiting for drafts ends at the deadline; several in a row without
a sign of life end the waiting altogether until there is one.
It must not know who starts and kills drafters: `suspect` tells the owner when to.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dflash2_ray.core.draft_port import Close, Commit, Open, Proposal, Rows, RowSpan, Wanted
from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.core.ledger import Ledger
from dflash2_ray.runtime.arrivals import Arrivals
from dflash2_ray.runtime.channel import Channel, ChannelClosed
from dflash2_ray.runtime.context_log import ContextLog
from dflash2_ray.runtime.draft_deadline import DraftDeadline
from dflash2_ray.runtime.draft_wire import (
    Answer,
    Frame,
    Message,
    WireError,
    head,
    kind_of,
    pack_ask,
    pack_step,
    unpack_answer,
)  # fmt: skip
from dflash2_ray.runtime.frame_writer import FrameWriter
from dflash2_ray.runtime.pending_rows import without_spans
from dflash2_ray.runtime.process_group import host_store
from dflash2_ray.runtime.tensor_lane import TARGET_RANK, GroupLane, TensorLane, check_transport

failure_log = FailureLog(logging.getLogger(__name__))
MIB = 1024 * 1024
_FAREWELL_S = 5.0  # for the writer's thread to end
_OWN_COUNTERS = ("num_late", "num_lost", "num_reconnects", "num_overflows", "num_failed_asks", "missing")


class DraftTiming(NamedTuple):
    """One measured proposal: from `ask` to the answer's arrival, late ones included."""

    num_requests: int
    width: int
    seconds: float


@dataclass(eq=False)
class _Asked:
    """The newest ask for one request, until it is collected or given up."""

    number: int
    wanted: Wanted
    settled: bool = False
    proposal: Proposal | None = None


@dataclass(eq=False)
class _Replay:
    """How much of a request has been told again."""

    begun: bool = False
    sent_len: int = 0


@dataclass(eq=False)
class _Link:
    """One connection. `replays`: requests that this drafter must still be told of, in order; all others are up to date.
    `asks`: when, for how many requests and how wide, by number."""

    generation: int
    channel: Channel
    arrivals: Arrivals
    lane: TensorLane | None
    writer: FrameWriter
    replays: dict[str, _Replay]
    asks: dict[int, tuple[float, int, int]] = field(default_factory=dict)


class RemoteDraftPort:
    """See the module. `send`, `ask`, `collect` belong to the step loop's thread; the rest may be called from any.

    deadline: how long `collect` waits where its caller does not say; default: by the measured times. transport: how context rows
    travel, `socket`, `gloo` or `nccl`.
    hung_after deadlines in a row without any answer end the waiting; once nothing was heard for hung_after_s as well,
    `suspect` is "hung". replay_bytes: most context that one call sends again. whole_bytes: a request that begins with more context rows
    than this (behind cached pages) is told bit by bit as well. timings: samples for a planner. `ledger`: what the
    drafter's work and the way to it took, and the bytes of tensors on that way.
    """

    def __init__(
        self,
        *,
        transport: str = "socket",
        hung_after: int = 3,
        hung_after_s: float = 10.0,
        max_queued_bytes: int = 256 * MIB,
        replay_bytes: int = 4 * MIB,
        whole_bytes: int = 32 * MIB,
        group_timeout_s: float = 30.0,
        deadline: DraftDeadline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_transport(transport)
        self.transport = transport
        self.timings: deque[DraftTiming] = deque(maxlen=256)
        self.last_latency_s: float | None = None
        self.ledger = Ledger()
        self.last_transfer_s = 0.0  # of it, what the drafter did not work
        self._deadline = deadline or DraftDeadline()
        self._hung_after, self._hung_after_s = hung_after, hung_after_s
        self._max_queued_bytes, self._replay_bytes, self._whole_bytes = max_queued_bytes, replay_bytes, whole_bytes
        self._group_timeout_s = group_timeout_s
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._connecting = threading.Lock()
        self._log = ContextLog()
        self._link: _Link | None = None
        self._asked: dict[str, _Asked] = {}
        self._number = 0  # of the newest frame
        self._generation = 0
        self._closed = False
        self._lost = False
        self._num_silent = 0  # deadlines in a row without any answer
        self._silent_since = 0.0
        self._num_answers = 0
        self._heard_number = 0  # of the newest question whose counters came
        self._own: Counter[str] = Counter()
        self._drafter_counters: dict[str, int] = {}
        self._past_counters: Counter[str] = Counter()  # of drafters that are gone

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether there is a drafter at the other end, alive or hung."""
        return self._link is not None

    @property
    def generation(self) -> int:
        """Of the newest connection; 0 before the first."""
        return self._generation

    @property
    def num_replaying(self) -> int:
        """Requests that the drafter has not been told of in full."""
        link = self._link
        return 0 if link is None else len(link.replays)

    @property
    def suspect(self) -> str | None:
        """Why to replace it. "lost": the connection broke. "hung": no sign of life. Either way the owner should replace the drafter and
        `connect` to the new one. None: nothing to do."""
        with self._changed:
            if self._lost:
                return "lost"
            quiet = self._link is not None and self._num_silent >= self._hung_after
            return "hung" if quiet and self._clock() - self._silent_since >= self._hung_after_s else None

    def connect(self, address: Mapping[str, Any], timeout_s: float = 30.0) -> None:
        """Take up a drafter at `address` (of its `DrafterServer`), in place of any earlier one. Blocks the calling thread
        only. Raises OSError or ChannelClosed when nobody answers, WireError when another release does."""
        with self._connecting:
            generation = self._generation + 1
            channel = Channel.connect(address, timeout_s)
            try:
                lane = self._shake_hands(channel, generation)
            except BaseException:
                channel.close()
                raise
            with self._changed:
                if self._closed:
                    channel.close()
                    raise ChannelClosed("the draft port is closed")
                self._drop_link()
                self._own["num_reconnects"] += self._generation > 0
                self._generation = generation
                self._lost, self._num_silent = False, 0
                self._deadline.restart()
                replays = {request_id: _Replay() for request_id in self._log}
                link = _Link(
                    generation, channel, Arrivals(channel.socket), lane, self._new_writer(channel, lane), replays
                )
                self._link = link
            threading.Thread(target=self._read, args=(link,), name="draft-link-reader", daemon=True).start()

    def _shake_hands(self, channel: Channel, generation: int) -> TensorLane | None:
        store, host = None, channel.local_host
        hello = head("hello", generation, 0, transport=self.transport)
        if self.transport != "socket":
            store = host_store(host, 2, self._group_timeout_s)
            hello |= {"store": [host, store.port], "group_timeout_s": self._group_timeout_s}
        channel.send(hello)
        lane = None
        if store is not None:
            lane = self._open_lane(store, host, generation)
        reply = channel.receive()
        if isinstance(reply, dict) and reply.get("kind") == "refused":
            raise WireError(f"the drafter turned us away: {reply.get('reason')}")
        if kind_of(reply) != "welcome" or reply["generation"] != generation:
            raise WireError(f"draft wire: expected a welcome to generation {generation}, got {reply}")
        channel.set_timeout(None)
        return lane

    def _open_lane(self, store: Any, host: str, generation: int) -> TensorLane:
        try:
            return GroupLane(
                self.transport,
                store,
                rank=TARGET_RANK,
                host=host,
                timeout_s=self._group_timeout_s,
                name=f"draft-{generation}",
            )
        except RuntimeError as error:
            raise ChannelClosed(f"transport {self.transport}: the drafter did not come to the group: {error}") from None

    def _new_writer(self, channel: Channel, lane: TensorLane | None) -> FrameWriter:
        def failed(reason: str) -> None:
            with self._changed:
                if self._link is not None and self._link.channel is channel:
                    self._lose(self._link, reason)

        return FrameWriter(channel, lane=lane, max_queued_bytes=self._max_queued_bytes, on_failure=failed)

    def close(self) -> None:
        """Let go of the drafter and of everything kept for it."""
        with self._changed:
            self._closed = True
            link = self._link
            self._drop_link()
            self._log.clear()
        if link is not None:
            link.writer.join(_FAREWELL_S)

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        self._asked.clear()
        if link is None:
            return
        self._past_counters.update(self._drafter_counters)
        self._drafter_counters = {}
        link.writer.close()
        link.channel.shut_down()  # the reader's thread closes it
        self._changed.notify_all()

    def _lose(self, link: _Link, reason: str) -> None:
        if self._link is not link:
            return
        failure_log.warning("the drafter of generation %d is lost: %s", link.generation, reason)
        self._drop_link()
        self._lost = True
        self._own["num_lost"] += 1

    # ---- the port -------------------------------------------------------------------------------------------------

    def send(self, messages: Sequence[Open | Rows | Commit | Close]) -> None:
        kept = [_on_host(message) if isinstance(message, Rows) else message for message in messages]
        with self._changed:
            if self._closed:
                return
            link = self._link
            if link is not None:
                by_lane = link.lane is not None and link.lane.device != "cpu"
                long = self._begin_with_much(kept)
                sent = self._without_replayed(link, messages if by_lane else kept, long)
                link.replays |= {request_id: _Replay() for request_id in long}
                if sent:
                    self._number += 1
                    self._put(link, pack_step(sent, link.generation, self._number, by_lane=link.lane is not None))
            self._log.apply(kept)
            self._replay()

    def ask(self, wanted: Sequence[Wanted]) -> None:
        with self._changed:
            self._replay()
            for want in wanted:
                self._asked.pop(want.request_id, None)
            link = self._link
            asked = []
            if link is not None and self._num_silent < self._hung_after:
                asked = [want for want in wanted if want.request_id not in link.replays]
            self._own["missing"] += len(wanted) - len(asked)
            if link is None or not asked:
                return
            self._number += 1
            link.asks[self._number] = (self._clock(), len(asked), max(want.width for want in asked))
            for want in asked:
                self._asked[want.request_id] = _Asked(self._number, want)
            self._put(link, pack_ask(asked, link.generation, self._number))

    def collect(self, wanted: Sequence[Wanted], deadline_s: float | None = None) -> list[Proposal]:
        with self._changed:
            mine = [
                asked
                for want in wanted
                if (asked := self._asked.get(want.request_id)) is not None and asked.wanted == want
            ]
            link = self._link
            end = self._clock() + (self._deadline.limit_s if deadline_s is None else deadline_s)
            num_answers = self._num_answers
            self._wait(lambda: all(asked.settled for asked in mine), link, end)
            num_open = sum(not asked.settled for asked in mine)
            self._own["missing"] += num_open
            if num_open and link is not None and self._link is link and self._num_answers == num_answers:
                self._note_silence(link)
            for asked in mine:
                if self._asked.get(asked.wanted.request_id) is asked:
                    del self._asked[asked.wanted.request_id]
            if (
                link is None or self._link is not link
            ):  # its contexts are gone, and so is whoever would explain its drafts
                return []
            return [asked.proposal for asked in mine if asked.proposal is not None]

    def counters(self) -> dict[str, int]:
        """The drafter's own as well: fresh if it answers within the deadline, else as last heard."""
        with self._changed:
            link = self._link
            if link is not None and self._num_silent < self._hung_after:
                self._number += 1
                number = self._number
                self._put(link, Frame(head("counters", link.generation, number)))
                self._wait(lambda: self._heard_number >= number, link, self._clock() + self._deadline.limit_s)
            total = Counter(self._past_counters)
            total.update(self._drafter_counters)
            return {**total, **{name: self._own[name] for name in _OWN_COUNTERS}}

    def _wait(self, done: Callable[[], bool], link: _Link | None, end: float) -> None:
        """Wait until `done`, `end`, or the link is gone; the first thread that waits reads, others are told by it."""
        while not done() and link is not None and self._link is link:
            left = end - self._clock()
            if left <= 0:
                return
            if link.arrivals.handed_over:
                self._changed.wait(left)
            else:
                self._read_here(link, left)

    def _read_here(self, link: _Link, timeout_s: float) -> None:
        """Wait for the connection and take what arrives. The lock is held, but not while waiting."""
        link.arrivals.hand_over()
        self._changed.release()
        try:
            link.arrivals.wait(timeout_s)
        finally:
            self._changed.acquire()
            self._take_arrived(link)
            link.arrivals.hand_back()
            self._changed.notify_all()

    def _note_silence(self, link: _Link) -> None:
        """A deadline has passed without any answer. Answers, however late, set `_num_silent` back to 0."""
        if self._num_silent == 0:
            oldest = next(iter(link.asks.values()), None)
            self._silent_since = self._clock() if oldest is None else oldest[0]
        self._num_silent += 1
        if self._num_silent == self._hung_after:
            failure_log.warning(
                "the drafter missed %d deadlines in a row; not waiting for it until it answers", self._num_silent
            )

    # ---- sending --------------------------------------------------------------------------------------------------

    def _put(self, link: _Link, frame: Frame) -> None:
        try:
            fits = link.writer.put(frame.header, frame.buffers, frame.tensors)
        except ChannelClosed as error:
            self._lose(link, str(error))
            return
        if fits:
            self.ledger.add(
                "transfer_bytes", sum(one.nbytes for one in frame.buffers) + sum(one.nbytes for one in frame.tensors)
            )
        else:
            self._own["num_overflows"] += 1
            self._lose(link, f"it takes nothing off its connection; {link.writer.queued_bytes} bytes wait")

    def _begin_with_much(self, messages: Sequence[Message]) -> set[str]:
        """Requests that are opened here with a message of their own that holds more rows than one frame should."""
        opened = {message.request_id for message in messages if isinstance(message, Open)}
        own = [m for m in messages if isinstance(m, Rows) and len(m.spans) == 1 and m.rows.nbytes > self._whole_bytes]
        return {message.spans[0].request_id for message in own} & opened

    def _without_replayed(self, link: _Link, messages: Sequence[Message], long: set[str]) -> list[Message]:
        """What may go out now. What concerns a request that is being told bit by bit, or will be (`long`), stays in the log, from where it
        follows."""
        if not link.replays and not long:
            return list(messages)
        kept: list[Message] = []
        for message in messages:
            if isinstance(message, Rows):
                rows = without_spans(message, link.replays.keys() | long)
                if rows is not None:
                    kept.append(rows)
                continue
            if message.request_id in long:
                continue
            replay = link.replays.get(message.request_id)
            if replay is None:
                kept.append(message)
                continue
            known = self._log.get(message.request_id)
            epoch = known.opened.epoch if known is not None else -1
            if isinstance(message, Open) and message.epoch > epoch:  # begins anew: up to date from here on
                del link.replays[message.request_id]
                kept.append(message)
            elif isinstance(message, Close) and message.epoch >= epoch:
                del link.replays[message.request_id]
                if replay.begun:
                    kept.append(message)
        return kept

    def _replay(self) -> None:
        """Tell the drafter of more of the log, at most `replay_bytes`, and nothing while it has yet to take what waits."""
        link = self._link
        if link is None or not link.replays or link.writer.queued_bytes >= self._replay_bytes:
            return
        budget = self._replay_bytes
        while link.replays and budget > 0 and self._link is link:
            request_id, replay = next(iter(link.replays.items()))
            budget -= self._replay_one(link, request_id, replay, budget)

    def _replay_one(self, link: _Link, request_id: str, replay: _Replay, budget: int) -> int:
        """Returns the bytes that went out."""
        known = self._log.get(request_id)
        if known is None or known.broken:  # nothing that could be told would make it whole
            del link.replays[request_id]
            return 0
        epoch, size = known.opened.epoch, 0
        messages: list[Message] = []
        if not replay.begun:
            messages.append(known.opened)
            replay.begun = True
        first = replay.sent_len = max(replay.sent_len, known.opened.first_position)
        if known.base_len > first:
            stop = min(known.base_len, first + max(1, budget // known.row_bytes))
            rows = known.rows(first, stop)
            messages.append(Rows((RowSpan(request_id, epoch, first, stop - first),), rows))
            messages.append(Commit(request_id, epoch, stop, known.anchor if stop == known.base_len else None))
            replay.sent_len, size = stop, rows.nbytes
        if replay.sent_len == known.base_len:
            for first, rows in known.pending:
                messages.append(Rows((RowSpan(request_id, epoch, first, rows.shape[0]),), rows))
            del link.replays[request_id]
        if messages:
            if link.lane is not None and link.lane.device != "cpu":
                messages = [_on_device(m, link.lane.device) if isinstance(m, Rows) else m for m in messages]
            self._number += 1
            self._put(link, pack_step(messages, link.generation, self._number, by_lane=link.lane is not None))
        return size

    # ---- receiving ------------------------------------------------------------------------------------------------

    def _read(self, link: _Link) -> None:
        """The reader's thread: takes what arrives while nobody waits, notices the end, and closes the connection behind it."""
        while self._link is link:
            link.arrivals.wait_in_background()
            with self._changed:
                if not link.arrivals.handed_over:
                    self._take_arrived(link)
                    self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: not link.arrivals.handed_over)
            link.arrivals.close()
        link.channel.close()

    def _take_arrived(self, link: _Link) -> None:
        """Everything that has arrived, in order. The lock is held."""
        try:
            while self._link is link and (frame := link.channel.arrived_frame()) is not None:
                header, buffers = frame
                kind = kind_of(header)
                if kind == "refused":
                    raise WireError(str(header.get("reason")))
                answer = unpack_answer(header, buffers)
                self.ledger.add("transfer_bytes", sum(len(buffer) for buffer in buffers))
                self._take(link, answer, is_draft=kind == "answer")
        except (ChannelClosed, ValueError) as error:
            self._lose(link, str(error))

    def _take(self, link: _Link, answer: Answer, *, is_draft: bool) -> None:
        if answer.generation != link.generation:
            self._own["num_late"] += max(1, len(answer.proposals))
            return
        self._num_silent = 0
        self._num_answers += 1
        self._drafter_counters = answer.counters
        if not is_draft:
            self._heard_number = max(self._heard_number, answer.number)
            return
        ask = link.asks.pop(answer.number, None)
        if ask is not None:
            for number in [number for number in link.asks if number < answer.number]:
                del link.asks[number]  # replaced in full by later ones: never answered
            self.last_latency_s = self._clock() - ask[0]
            self.last_transfer_s = max(0.0, self.last_latency_s - answer.draft_s)
            self._deadline.observe(self.last_latency_s)
            self.ledger.observe("draft_s", answer.draft_s)
            self.ledger.observe("transfer_s", self.last_transfer_s)
            self.timings.append(DraftTiming(ask[1], ask[2], self.last_latency_s))
        if answer.error is not None:
            self._own["num_failed_asks"] += 1
            failure_log.warning("the drafter could not draft: %s", answer.error)
        for proposal in answer.proposals:
            asked = self._asked.get(proposal.request_id)
            if asked is None or asked.number != answer.number or asked.settled or not _fits(asked.wanted, proposal):
                self._own["num_late"] += 1
            else:
                asked.proposal = proposal
        for request_id in answer.settled:
            asked = self._asked.get(request_id)
            if asked is not None and asked.number == answer.number:
                asked.settled = True


def _fits(wanted: Wanted, proposal: Proposal) -> bool:
    return (proposal.epoch, proposal.base_len) == (wanted.epoch, wanted.base_len) and 0 < len(
        proposal.token_ids
    ) <= wanted.width


def _on_host(message: Rows) -> Rows:
    """Rows as they are sent and kept: contiguous CPU memory."""
    return Rows(message.spans, message.rows.detach().to("cpu").contiguous())


def _on_device(message: Rows, device: str) -> Rows:
    return Rows(message.spans, message.rows.to(device))
