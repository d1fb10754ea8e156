"""The draft port's messages as frames: a plain header, and tensors as raw buffers (or announced, where a lane carries them).

Every header holds the version, the generation of the connection, a number (step or ask) and a kind. A header of another
version, and one that cannot be read, is refused with what was expected. It must not know sockets or models.

Shapes: T context rows, H hidden, W slots of all sampled proposals of an answer, C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Proposal, Rows, RowSpan, Wanted

VERSION = 1
Message = Open | Rows | Commit | Close
Receive = Callable[[Sequence[int], torch.dtype], torch.Tensor]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WireError(ValueError):
    """A frame that this version cannot read."""


@dataclass(frozen=True)
class Frame:
    """buffers go with the header; tensors behind it, through a lane."""

    header: dict[str, Any]
    buffers: list[memoryview] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """What came of one ask. settled: the requests it answers for, with or without a proposal. error: why there is no
    proposal at all. draft_s: seconds that the drafter worked on it. counters: the drafter's, so far."""

    generation: int
    number: int
    settled: tuple[str, ...]
    proposals: list[Proposal]
    error: str | None
    draft_s: float
    counters: dict[str, int]


def head(kind: str, generation: int, number: int, **rest: Any) -> dict[str, Any]:
    """A header."""
    return {"version": VERSION, "generation": generation, "number": number, "kind": kind, **rest}


def kind_of(header: Any) -> str:
    """Raises WireError for another version, and for what is no header."""
    if not isinstance(header, dict) or "version" not in header:
        raise WireError(f"draft wire: expected a header with a version, got {str(header)[:80]!r}")
    if header["version"] != VERSION:
        raise WireError(
            f"draft wire: expected version {VERSION}, got {header['version']!r}; both sides must run the same release"
        )
    if not isinstance(header.get("generation"), int) or not isinstance(header.get("number"), int):
        raise WireError("draft wire: expected a generation and a number in the header")
    return str(header.get("kind"))


# ---- target → drafter -----------------------------------------------------------------------------------------------


def pack_step(messages: Sequence[Message], generation: int, number: int, *, by_lane: bool = False) -> Frame:
    """Messages of one step, in order. by_lane: row tensors are announced and travel through the lane."""
    frame = Frame(head("step", generation, number, messages=[]))
    for message in messages:
        if isinstance(message, Rows):
            if by_lane:
                frame.tensors.append(message.rows.detach().contiguous())
            else:
                frame.buffers.append(as_bytes(message.rows))
            spans = [[span.request_id, span.epoch, span.first_position, span.num_rows] for span in message.spans]
            packed = ["rows", spans, _NAMES[message.rows.dtype], list(message.rows.shape), by_lane]
        elif isinstance(message, Open):
            packed = [
                "open",
                message.request_id,
                message.epoch,
                message.temperature,
                message.seed,
                message.matching,
                message.first_position,
            ]
        elif isinstance(message, Commit):
            packed = ["commit", message.request_id, message.epoch, message.base_len, message.anchor]
        else:
            packed = ["close", message.request_id, message.epoch]
        frame.header["messages"].append(packed)
    return frame


def unpack_step(
    header: Mapping[str, Any], buffers: Sequence[bytearray], receive: Receive | None = None
) -> list[Message]:
    """receive(shape, dtype): the next tensor of the lane. Raises WireError."""
    return _reading("step", lambda: _unpack_messages(header["messages"], iter(buffers), receive))


def _unpack_messages(packed: Sequence[Any], buffers: Any, receive: Receive | None) -> list[Message]:
    messages: list[Message] = []
    for kind, *fields in packed:
        if kind == "rows":
            spans, dtype, shape, by_lane = fields
            if not by_lane:
                rows = from_bytes(next(buffers), dtype, shape)
            elif receive is None:
                raise WireError("draft wire: rows were announced for a lane, but this connection has none")
            else:
                rows = receive(shape, _DTYPES[dtype])
            own = tuple(RowSpan(*span) for span in spans)
            if len(shape) != 2 or shape[0] != sum(span.num_rows for span in own):
                raise WireError(
                    f"draft wire: rows: expected {sum(span.num_rows for span in own)} by hidden, got shape {shape}"
                )
            messages.append(Rows(own, rows))
        elif kind == "open":
            messages.append(Open(*fields))
        elif kind == "commit":
            messages.append(Commit(*fields))
        elif kind == "close":
            messages.append(Close(*fields))
        else:
            raise WireError(f"draft wire: expected rows, open, commit or close, got {kind!r}")
    return messages


def pack_ask(wanted: Sequence[Wanted], generation: int, number: int) -> Frame:
    """An ask; `number` comes back in its answer."""
    rows = [[want.request_id, want.epoch, want.base_len, want.width] for want in wanted]
    return Frame(head("ask", generation, number, wanted=rows))


def unpack_ask(header: Mapping[str, Any]) -> list[Wanted]:
    """Raises WireError."""
    return _reading("ask", lambda: [Wanted(*row) for row in header["wanted"]])


# ---- drafter → target -----------------------------------------------------------------------------------------------


def pack_answer(answer: Answer) -> Frame:
    """The q rows of all sampled proposals go as two tensors: ids [W, C] int64 and probabilities [W, C] fp32."""
    sampled = [proposal for proposal in answer.proposals if proposal.candidate_ids is not None]
    packed = [
        [p.request_id, p.epoch, p.base_len, list(p.token_ids), p.candidate_ids is not None] for p in answer.proposals
    ]
    frame = Frame(
        head(
            "answer", answer.generation, answer.number, settled=list(answer.settled), proposals=packed, error=answer.error,
            draft_s=answer.draft_s, counters=answer.counters, q_shape=[0, 0],
        )
    )  # fmt: skip
    if sampled:
        ids = torch.cat([proposal.candidate_ids for proposal in sampled]).to("cpu", torch.int64)
        probs = torch.cat([proposal.candidate_probs for proposal in sampled]).to("cpu", torch.float32)
        frame.header["q_shape"] = list(ids.shape)
        frame.buffers.extend([as_bytes(ids), as_bytes(probs)])
    return frame


def unpack_answer(header: Mapping[str, Any], buffers: Sequence[bytearray]) -> Answer:
    """Raises WireError."""
    return _reading("answer", lambda: _unpack_answer(header, buffers))


def _unpack_answer(header: Mapping[str, Any], buffers: Sequence[bytearray]) -> Answer:
    ids = probs = None
    if buffers:
        ids = from_bytes(buffers[0], "int64", header["q_shape"])
        probs = from_bytes(buffers[1], "float32", header["q_shape"])
    proposals, offset = [], 0
    for request_id, epoch, base_len, token_ids, sampled in header["proposals"]:
        own_ids = own_probs = None
        if sampled:
            if ids is None or probs is None or offset + len(token_ids) > ids.shape[0]:
                raise WireError(
                    f"draft wire: proposal for {request_id!r}: expected {len(token_ids)} rows of candidates"
                )
            own_ids, own_probs = ids[offset : offset + len(token_ids)], probs[offset : offset + len(token_ids)]
            offset += len(token_ids)
        proposals.append(Proposal(request_id, epoch, base_len, tuple(token_ids), own_ids, own_probs))
    return Answer(
        header["generation"], header["number"], tuple(header["settled"]), proposals, header["error"],
        float(header["draft_s"]), dict(header["counters"]),
    )  # fmt: skip


# ---- tensors --------------------------------------------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a CPU tensor (a copy only where it is not contiguous)."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def from_bytes(buffer: bytearray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over the buffer's memory. Raises WireError when the sizes do not fit."""
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise WireError(f"draft wire: expected a dtype of {', '.join(_DTYPES)}, got {dtype!r}")
    count = 1
    for size in shape:
        count *= size
    if count * kind.itemsize != len(buffer):
        raise WireError(
            f"draft wire: a tensor of shape {list(shape)} and {dtype}: expected {count * kind.itemsize} bytes, got {len(buffer)}"
        )
    if count == 0:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).view(tuple(shape))


def _reading(kind, unpack):  # type: ignore[no-untyped-def]
    try:
        return unpack()
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise WireError(f"draft wire: {kind}: not readable: {error!r}") from None
