"""What a stream sends, and how often."""

import asyncio
import json

import pytest

from dflash2_ray.core.generation import Generation, GenerationChunk, Usage
from dflash2_ray.errors import StepFailed
from dflash2_ray.serving.event_stream import EventStream
from dflash2_ray.serving.openai_api import Echo, Envelope, read_request
from dflash2_ray.serving.pace import Pace

STATS = {"num_spec_steps": 0, "num_accepted_draft_tokens": 0, "skipped_reason": None}
TIMING = {"time_to_first_token_s": 0.1, "time_per_output_token_s": None, "end_to_end_s": 0.1}


def chunk(text, ends=False):
    usage = Usage(3, 1)
    whole = Generation("r", text, [1], "stop", None, usage, metrics={"speculative_decoding": STATS, "timing": TIMING})
    return GenerationChunk("r", text, (1,), usage, "stop" if ends else None, whole if ends else None)


def pieces(chunks, *, chat, num_choices=1):
    """The events of each piece."""
    body = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    asked = read_request(
        {**body, "stream": True, "stream_options": {"include_usage": True}},
        None,
        chat=chat,
        served_model="m",
        strict=False,
        max_width=7,
    )

    async def source():
        for item in chunks:
            if isinstance(item, Exception):
                raise item
            yield item

    async def run():
        events = EventStream(asked, Envelope("id", "m", chat, 0), None, [Echo()] * num_choices)
        return [piece async for piece in events.pieces(source())]

    sent = asyncio.run(run())
    assert all(piece.endswith("\n\n") for piece in sent)
    return [[event.removeprefix("data: ") for event in piece.split("\n\n")[:-1]] for piece in sent]


@pytest.mark.parametrize("chat", [False, True])
def test_one_piece_per_chunk_with_what_stands_before_and_behind_the_text(chat):
    first, middle, last = pieces([(0, chunk("a")), (0, chunk("b")), (0, chunk("c", ends=True))], chat=chat)
    assert len(first) == (2 if chat else 1)
    assert len(middle) == 1
    assert last[-1] == "[DONE]"
    assert json.loads(last[-2])["usage"]["total_tokens"] == 4
    assert "stop" in {json.loads(event)["choices"][0]["finish_reason"] for event in last[:-2]}


def test_an_answer_of_one_chunk_is_one_piece():
    (only,) = pieces([(0, chunk("a", ends=True))], chat=True)
    assert json.loads(only[0])["choices"][0]["delta"]["role"] == "assistant"
    assert only[-1] == "[DONE]"


def test_the_end_waits_for_every_choice():
    sent = pieces([(0, chunk("a", ends=True)), (1, chunk("b")), (1, chunk("c", ends=True))], chat=False, num_choices=2)
    assert [len(events) for events in sent] == [1, 1, 3]


def test_an_error_is_the_last_event_but_done():
    first, last = pieces([(0, chunk("a")), StepFailed("inside")], chat=False)
    assert len(first) == 1
    assert json.loads(last[0])["error"]["type"] == "server_error"
    assert last[1:] == ["[DONE]"]


def test_streams_wait_longer_the_more_they_are():
    pace = Pace()
    with pace.streams(1):
        alone = pace.hold_s()
        with pace.streams(15):
            assert pace.hold_s() == pytest.approx(16 * alone)
    assert 0 < alone < 0.005  # less than any step
    assert pace.hold_s() == 0.0
