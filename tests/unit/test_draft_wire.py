"""Every message of the port survives the wire bit for bit, and what is not of this version is refused with a reason."""

import msgpack
import pytest
import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Proposal, Rows, RowSpan, Wanted
from dflash2_ray.runtime.draft_wire import (
    VERSION,
    Answer,
    WireError,
    as_bytes,
    from_bytes,
    head,
    kind_of,
    pack_answer,
    pack_ask,
    pack_step,
    unpack_answer,
    unpack_ask,
    unpack_step,
)


def travel(frame):
    """Header and buffers as they arrive."""
    return msgpack.unpackb(msgpack.packb(frame.header)), [bytearray(buffer) for buffer in frame.buffers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_lane", [False, True])
def test_step(dtype, by_lane):
    rows = torch.randn(5, 7).to(dtype)
    messages = [
        Open("a", 3, 0.7, 2**64 - 1, True), Rows((RowSpan("a", 3, 0, 2), RowSpan("b", 0, 9, 3)), rows), Commit("a", 3, 2, None),
        Commit("b", 0, 12, 5), Close("c", 1), Rows((RowSpan("a", 3, 2, 0),), rows[:0]), Open("d", 0, 0.0, 0),
    ]  # fmt: skip
    frame = pack_step(messages, 4, 11, by_lane=by_lane)
    header, buffers = travel(frame)
    assert (kind_of(header), header["generation"], header["number"]) == ("step", 4, 11)
    assert len(buffers) == (0 if by_lane else 2)
    tensors = iter(frame.tensors)
    got = unpack_step(header, buffers, (lambda shape, dtype: next(tensors)) if by_lane else None)
    for one, other in zip(messages, got, strict=True):
        if isinstance(one, Rows):
            assert one.spans == other.spans
            assert one.rows.dtype == other.rows.dtype
            assert one.rows.shape == other.rows.shape
            assert torch.equal(one.rows, other.rows)
        else:
            assert one == other
    assert got[0].matching is True
    assert got[6].matching is False


def test_rows_that_are_a_part_of_a_tensor():
    whole = torch.randn(6, 8)
    part = whole[::2, :4]
    assert torch.equal(from_bytes(bytearray(as_bytes(part)), "float32", [3, 4]), part)
    with torch.inference_mode():
        made = torch.randn(3, 4)
    assert torch.equal(from_bytes(bytearray(as_bytes(made)), "float32", [3, 4]), made)


def test_ask():
    wanted = [Wanted("a", 1, 20, 3), Wanted("b", 0, 5, 1)]
    header, buffers = travel(pack_ask(wanted, 2, 9))
    assert buffers == []
    assert unpack_ask(header) == wanted


def test_answer():
    ids, probs = torch.randint(0, 99, (3, 4)), torch.rand(3, 4)
    proposals = [
        Proposal("a", 1, 20, (1, 2, 3), ids, probs), Proposal("b", 0, 5, (7,)), Proposal("c", 0, 8, (9,), ids[:1] + 1, probs[:1] / 2),
    ]  # fmt: skip
    answer = Answer(2, 9, ("a", "b", "c", "d"), proposals, None, 0.25, {"stale_base": 3})
    got = unpack_answer(*travel(pack_answer(answer)))
    assert (got.generation, got.number, got.settled, got.error, got.draft_s, got.counters) == (
        2, 9, ("a", "b", "c", "d"), None, 0.25, {"stale_base": 3},
    )  # fmt: skip
    assert [p.token_ids for p in got.proposals] == [(1, 2, 3), (7,), (9,)]
    assert got.proposals[1].candidate_ids is None
    for one, other in ((proposals[0], got.proposals[0]), (proposals[2], got.proposals[2])):
        assert torch.equal(one.candidate_ids, other.candidate_ids)
        assert torch.equal(one.candidate_probs, other.candidate_probs)
        assert (other.candidate_ids.dtype, other.candidate_probs.dtype) == (torch.int64, torch.float32)
    failed = unpack_answer(*travel(pack_answer(Answer(1, 2, ("a",), [], "it broke", 0.0, {}))))
    assert (failed.error, failed.proposals) == ("it broke", [])


def test_versions():
    header = head("ask", 1, 1, wanted=[]) | {"version": VERSION + 1}
    with pytest.raises(WireError, match=f"expected version {VERSION}, got {VERSION + 1}"):
        kind_of(header)
    for other in ({}, [], None, "x"):
        with pytest.raises(WireError, match="expected a header with a version"):
            kind_of(other)
    with pytest.raises(WireError, match="generation"):
        kind_of({"version": VERSION, "kind": "ask", "generation": None, "number": 1})


@pytest.mark.parametrize(
    ("messages", "buffers", "reason"),
    [
        ([["rows", [["a", 0, 0, 2]], "float32", [2, 4], False]], [bytearray(31)], "expected 32 bytes, got 31"),
        ([["rows", [["a", 0, 0, 3]], "float32", [2, 4], False]], [bytearray(32)], "expected 3 by hidden"),
        ([["rows", [["a", 0, 0, 2]], "float8", [2, 4], False]], [bytearray(32)], "expected a dtype of"),
        ([["rows", [["a", 0, 0, 2]], "float32", [2, 4], False]], [], "not readable"),
        ([["rows", [["a", 0, 0, 2]], "float32", [2, 4], True]], [], "this connection has none"),
        ([["rows", [["a", 0]], "float32", [2, 4], False]], [bytearray(32)], "not readable"),
        ([["commit", "a"]], [], "not readable"),
        ([["verify", "a"]], [], "got 'verify'"),
        (None, [], "not readable"),
    ],
)
def test_broken_steps(messages, buffers, reason):
    with pytest.raises(WireError, match=reason):
        unpack_step(head("step", 1, 1, messages=messages), buffers)


def test_broken_answers_and_asks():
    with pytest.raises(WireError, match="ask: not readable"):
        unpack_ask(head("ask", 1, 1, wanted=[["a"]]))
    header = pack_answer(Answer(1, 2, ("a",), [], None, 0.0, {})).header
    with pytest.raises(WireError, match="answer: not readable"):
        unpack_answer(header | {"proposals": [["a"]]}, [])
    with pytest.raises(WireError, match="expected 2 rows of candidates"):
        unpack_answer(header | {"proposals": [["a", 0, 5, [1, 2], True]]}, [])
