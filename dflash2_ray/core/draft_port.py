"""The port between target and drafter: five messages, the same for every placement and transport.

    OPEN     target → drafter   a request begins (or begins again, with a higher epoch, after a preemption)
    ROWS     target → drafter   context rows (target features after the drafter's `fc`, before its norm)
    COMMIT   target → drafter   how many positions are committed, and the new anchor
    PROPOSE  drafter → target   a draft for the block that starts at the committed length
    CLOSE    target → drafter   the request is gone; its context may be dropped

Rules. Messages are idempotent. A message whose epoch is not the request's current one, or whose positions do not fit,
is dropped and counted, never applied. A proposal is bound to (request, epoch, base_len); the target drops it when any
of them has moved on. A request whose context rows have a gap is never drafted for. Losslessness never depends on the
drafter being right, only on `candidate_probs` being exactly what the drafted tokens were drawn from.

What is made per request and step is never changed once it is made, but not frozen: a frozen dataclass takes three times as long to make.
Row payloads are opaque here (`Any`): tensors in process, buffers on a wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash2_ray.core.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Open:
    """A request begins. temperature: below 1e-5 the walk is greedy. seed: the request's 64-bit noise key.

    matching: the target verifies by token matching (`sampling.rejection`), so the walk draws with the target's own noise and
    sends no q. first_position: the first one whose row comes, and the base length to begin with; above 0 only where no layer's window
    reaches further back.
    """

    request_id: str
    epoch: int
    temperature: float
    seed: int
    matching: bool = False
    first_position: int = 0


@dataclass(slots=True)
class RowSpan:
    """Where a run of context rows belongs: positions `first_position … first_position + num_rows - 1`."""

    request_id: str
    epoch: int
    first_position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Context rows of one target step: `rows` [T, H] holds the spans' rows one after the other."""

    spans: tuple[RowSpan, ...]
    rows: Any


@dataclass(slots=True)
class Commit:
    """Positions `0 … base_len - 1` are committed; rows at or beyond `base_len` are void.

    `anchor`: the newest committed token, at position `base_len`; None in the middle of a prefill.
    """

    request_id: str
    epoch: int
    base_len: int
    anchor: int | None


@dataclass(frozen=True, slots=True)
class Close:
    """The request is gone. An epoch lower than the current one is stale and ignored."""

    request_id: str
    epoch: int


@dataclass(slots=True)
class Wanted:
    """A proposal that the target asks for: drafts for positions `base_len + 1 … base_len + width`."""

    request_id: str
    epoch: int
    base_len: int
    width: int


@dataclass(slots=True)
class Proposal:
    """A draft of `width` tokens behind the anchor at position `base_len`.

    token_ids: `width` ids. candidate_ids [width, C] int64 and candidate_probs [width, C] fp32 (in process: CPU or device
    tensors): the realised q row of each slot, zero elsewhere; None for a greedy or matching walk, whose q is not needed.
    """

    request_id: str
    epoch: int
    base_len: int
    token_ids: tuple[int, ...]
    candidate_ids: Any = None
    candidate_probs: Any = None


class DraftPort(Protocol):
    """What the target side sees of a drafter, wherever it runs. ledger: what its drafts took. last_transfer_s: how long the newest
    proposals were on their way, the drafter's own work left out."""

    ledger: Ledger
    last_transfer_s: float

    @property
    def connected(self) -> bool:
        """Whether there is a drafter at the other end, alive or hung."""
        ...

    def send(self, messages: Sequence[Open | Rows | Commit | Close]) -> None:
        """Hand over the messages of one step, in order. Never blocks on the drafter's work; never raises for a
        message that is stale."""
        ...

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """Ask for proposals; the drafter may start. Never blocks on its work. A request has at most one asked proposal: a
        later `ask` for it replaces the earlier one."""
        ...

    def collect(self, wanted: Sequence[Wanted], deadline_s: float | None = None) -> list[Proposal]:
        """Proposals for what was asked, in any order, waiting for at most `deadline_s` seconds (None: the port's own limit).
        A request that cannot be drafted for, or is late, is left out (the target then decodes it plainly in the same
        step); a proposal that comes later is dropped and counted."""
        ...

    def counters(self) -> dict[str, int]:
        """Messages dropped, by reason (`stale_epoch`, `stale_base`, `unknown_request`, `missing_rows` …)."""
        ...

    def close(self) -> None:
        """Release the drafter's resources."""
        ...


def propose(port: DraftPort, wanted: Sequence[Wanted], deadline_s: float | None = None) -> list[Proposal]:
    """Ask and wait: the serial use of a port."""
    port.ask(wanted)
    return port.collect(wanted, deadline_s)
