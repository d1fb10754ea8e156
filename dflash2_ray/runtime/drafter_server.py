"""Serves one target at a time over a listener: its messages in order, then the drafts that it asks for.

The thread that calls `run` takes frames off the connection, applies and drafts: no hand-over between threads on the way.
Everything that has arrived is applied before a draft begins, and an ask that a later one for the same request replaced is not
drafted. A new target begins with no contexts. It must not know ray, nor what the target does with a draft.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Never

from dflash2_ray.core.draft_port import Proposal, Rows, Wanted
from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.runtime.channel import Channel, ChannelClosed, Listener
from dflash2_ray.runtime.draft_wire import (
    Answer,
    Frame,
    Message,
    WireError,
    head,
    kind_of,
    pack_answer,
    unpack_ask,
    unpack_step,
)  # fmt: skip
from dflash2_ray.runtime.drafter_runner import DrafterRunner
from dflash2_ray.runtime.process_group import join_store
from dflash2_ray.runtime.tensor_lane import DRAFTER_RANK, GroupLane, TensorLane, check_transport

logger = logging.getLogger(__name__)
failure_log = FailureLog(logger)
HANDSHAKE_S = 30.0
_MOST_ROWS = 4096  # context rows that are taken in with one pass


@dataclass(frozen=True)
class _Arrived:
    """One frame. kind: `step` (messages), `ask` (wanted) or `counters`."""

    kind: str
    number: int
    messages: Sequence[Message] = ()
    wanted: Sequence[Wanted] = ()


class DrafterServer:
    """`run()` serves one target until it goes away, and may be called again; `serve()` does that until `stop()`.

    `address`: what a target's `RemoteDraftPort.connect` needs. num_steps: pieces of work done since the start.
    """

    def __init__(
        self, runner: DrafterRunner, token: str, *, host: str = "127.0.0.1", path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.listener = Listener(host, token, path=path)
        self.num_steps = 0
        self.stopped = False
        self._clock = clock
        self._busy_since: float | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()  # between `stop` and the beginning of a connection

    @property
    def address(self) -> dict[str, Any]:
        return self.listener.address

    @property
    def age_s(self) -> float:
        """Seconds that the piece of work in hand has taken so far; 0 while waiting for the target."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def serve(self) -> None:
        """Serve one target after the other until `stop`."""
        while not self.stopped:
            logger.info("drafter: %s", self.run())

    def run(self) -> str:
        """Serve one target; returns why it ended. Contexts and counters begin anew."""
        try:
            channel = self.listener.accept()
        except OSError:
            self.stopped = True
            return "stopped before a target connected"
        with self._lock:
            if self.stopped:
                channel.close()
                return "stopped"
            self._channel = channel
        try:
            self._serve(channel)
        except ChannelClosed:
            return "stopped" if self.stopped else "the target went away"
        except Exception as error:  # whatever a target does, the next one is served
            failure_log.warning("the target is turned away: %s", error)
            self._refuse(channel, str(error))
            return f"the target was turned away: {error}"
        finally:
            self._busy_since = None
            self._channel = None
            channel.close()
            self.runner.close()
            self.runner.counters.clear()

    def stop(self) -> None:
        """End `run()` after the piece of work in hand. May be called from any thread."""
        with self._lock:
            self.stopped = True
            channel = self._channel
        self.listener.close()
        if channel is not None:
            channel.close()

    # ---- one connection -------------------------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> Never:
        generation, lane = self._welcome(channel)
        try:
            self._work(channel, generation, lane)
        finally:
            if lane is not None:
                lane.close()

    def _work(self, channel: Channel, generation: int, lane: TensorLane | None) -> Never:
        asks = _Asks()
        while True:
            arrived = _drain(channel, generation, lane, block=not asks)
            self._busy_since = self._clock()
            questions = self._take(arrived, asks)
            if asks:
                _send(channel, pack_answer(self._draft(generation, *asks.pop())))
            for number in questions:
                counters = dict(self.runner.counters)
                answer = Answer(generation, number, (), [], None, 0.0, counters)
                _send(channel, Frame({**pack_answer(answer).header, "kind": "counters"}))
            self.num_steps += 1
            self._busy_since = None

    def _welcome(self, channel: Channel) -> tuple[int, TensorLane | None]:
        """Answer the target's hello; returns the connection's generation and lane."""
        channel.set_timeout(HANDSHAKE_S)
        hello = channel.receive()
        if kind_of(hello) != "hello":
            raise WireError(f"draft wire: expected a hello first, got {hello['kind']!r}")
        generation, transport = hello["generation"], hello.get("transport", "socket")
        check_transport(transport)
        lane: TensorLane | None = None
        if transport != "socket":
            host, port = hello["store"]
            timeout_s = float(hello["group_timeout_s"])
            lane = GroupLane(
                transport, join_store(host, port, 2, timeout_s), rank=DRAFTER_RANK, host=channel.local_host,
                timeout_s=timeout_s, name=f"draft-{generation}",
            )  # fmt: skip
        channel.set_timeout(None)
        channel.send(head("welcome", generation, 0))
        return generation, lane

    def _refuse(self, channel: Channel, reason: str) -> None:
        with contextlib.suppress(ChannelClosed):
            channel.send(head("refused", 0, 0, reason=reason))

    def _take(self, arrived: Sequence[_Arrived], asks: "_Asks") -> list[int]:
        """Apply messages in order, note asks; returns the numbers of questions for counters."""
        messages: list[Message] = []
        num_rows = 0
        questions = []
        for one in arrived:
            if one.kind == "step":
                new_rows = sum(message.rows.shape[0] for message in one.messages if isinstance(message, Rows))
                if messages and num_rows + new_rows > _MOST_ROWS:
                    self._apply(messages)
                    messages, num_rows = [], 0
                messages.extend(one.messages)
                num_rows += new_rows
            elif one.kind == "ask":
                asks.add(one.number, one.wanted)
            elif one.kind == "counters":
                questions.append(one.number)
        if messages:
            self._apply(messages)
        return questions

    def _apply(self, messages: Sequence[Message]) -> None:
        """A failure leaves contexts half made, so it ends the connection; the target tells a new one everything again."""
        try:
            self.runner.apply(messages)
        except Exception as error:
            failure_log.exception("taking in %d messages failed", len(messages))
            raise RuntimeError(f"taking in {len(messages)} messages failed: {type(error).__name__}: {error}") from error

    def _draft(self, generation: int, number: int, wanted: Sequence[Wanted]) -> Answer:
        started = self._clock()
        proposals: list[Proposal] = []
        error = None
        try:
            proposals = self.runner.propose(wanted)
        except Exception as failure:  # whatever it was, it costs these drafts only
            failure_log.exception("drafting failed for %d requests", len(wanted))
            error = f"{type(failure).__name__}: {failure}"
            self.runner.counters["failed_drafts"] += 1
        settled = tuple(want.request_id for want in wanted)
        counters = dict(self.runner.counters)
        return Answer(generation, number, settled, proposals, error, self._clock() - started, counters)


class _Asks:
    """Open asks, oldest first; a later ask for a request takes it out of the earlier one."""

    def __init__(self) -> None:
        self._by_number: dict[int, dict[str, Wanted]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def add(self, number: int, wanted: Sequence[Wanted]) -> None:
        for want in wanted:
            for other, requests in list(self._by_number.items()):
                if requests.pop(want.request_id, None) is not None and not requests:
                    del self._by_number[other]
        self._by_number[number] = {want.request_id: want for want in wanted}

    def pop(self) -> tuple[int, list[Wanted]]:
        number = next(iter(self._by_number))
        return number, list(self._by_number.pop(number).values())


def _drain(channel: Channel, generation: int, lane: TensorLane | None, *, block: bool) -> list[_Arrived]:
    """Everything that has arrived; with `block`, at least one. Raises ChannelClosed, and WireError for what is not readable."""
    frame = channel.receive_frame() if block else channel.arrived_frame()
    arrived = []
    while frame is not None:
        arrived.append(_unpack(*frame, generation, lane))
        frame = channel.arrived_frame()
    return arrived


def _unpack(header: Any, buffers: Sequence[bytearray], generation: int, lane: TensorLane | None) -> _Arrived:
    kind = kind_of(header)
    if header["generation"] != generation:
        raise WireError(f"draft wire: expected generation {generation}, got {header['generation']}")
    number = header["number"]
    if kind == "step":
        return _Arrived(kind, number, messages=unpack_step(header, buffers, lane.receive if lane is not None else None))
    if kind == "ask":
        return _Arrived(kind, number, wanted=unpack_ask(header))
    if kind == "counters":
        return _Arrived(kind, number)
    raise WireError(f"draft wire: expected step, ask or counters, got {kind!r}")


def _send(channel: Channel, frame: Frame) -> None:
    channel.send(frame.header, frame.buffers)
