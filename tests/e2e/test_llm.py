"""`LLM` as its user meets it: inputs, streams, cancellation, and bad input that disturbs nothing."""

import json

import pytest

from dflash2_ray.errors import ContextLengthExceeded, InvalidRequest


def test_texts_ids_and_conversations(embedded):
    engine = embedded(max_num_seqs=4)
    by_text = engine.generate(["import os", "def f("], temperature=0, max_tokens=8)
    ids = [engine.tokenizer.encode(text) for text in ("import os", "def f(")]
    by_ids = engine.generate(prompt_token_ids=ids, temperature=0, max_tokens=8)
    assert [one.text for one in by_text] == [one.text for one in by_ids]
    assert by_text[0].usage.completion_tokens == len(by_text[0].token_ids) == 8
    (single,) = engine.generate("import os", temperature=0, max_tokens=8)
    assert single.token_ids == by_text[0].token_ids
    chat = [{"role": "user", "content": 'Spell the word "cake".'}]
    assert [one.text for one in engine.chat([chat, chat], temperature=0)] == [
        engine.chat(chat, temperature=0)[0].text
    ] * 2


def test_stream_pieces_are_the_text_and_long_answers_keep_speculating(embedded):
    engine = embedded(max_num_seqs=4)
    options = {"temperature": 0, "max_tokens": 600, "ignore_eos": True}
    chunks = list(engine.stream("Once upon a time", **options))
    generation = chunks[-1].generation
    assert "".join(chunk.text for chunk in chunks) == generation.text
    assert [token for chunk in chunks for token in chunk.token_ids] == generation.token_ids
    stats = generation.metrics["speculative_decoding"]
    assert stats["num_plain_steps"] <= 1
    assert stats["num_accepted_draft_tokens"] > 300
    (plain,) = engine.generate("Once upon a time", num_speculative_tokens=0, **options)
    assert plain.token_ids == generation.token_ids


def test_leaving_a_stream_frees_everything(embedded):
    engine = embedded(max_num_seqs=4)
    stream = engine.stream("Once upon a time", max_tokens=500, ignore_eos=True)
    next(stream)
    assert engine.describe()["num_requests_running"] == 1
    stream.close()
    facts = engine.describe()
    assert facts["num_requests_running"] == 0
    assert facts["num_free_pages"] == facts["num_pages"]
    assert engine._loop.draft_port.runner.num_requests == 0


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"prompts": [""]}, InvalidRequest),
        ({"prompts": []}, None),
        ({"prompt_token_ids": [[1], [9999]]}, InvalidRequest),
        ({"prompt_token_ids": [True]}, InvalidRequest),
        ({"prompts": [5]}, InvalidRequest),
        ({}, InvalidRequest),
        ({"prompts": "a", "prompt_token_ids": [1]}, InvalidRequest),
        ({"prompt_token_ids": [5] * 3000}, ContextLengthExceeded),
        ({"prompts": "a", "max_tokens": 10**6}, ContextLengthExceeded),
        ({"prompts": "a", "temperatur": 1}, InvalidRequest),
        ({"prompts": "a", "top_p": 2}, InvalidRequest),
    ],
    ids=str,
)
def test_bad_input_is_told_before_anything_runs(embedded, arguments, kind):
    engine = embedded(max_num_seqs=4)
    steps = engine.describe()["num_steps"]
    if kind is None:
        assert engine.generate(**arguments) == []
    else:
        with pytest.raises(kind):
            engine.generate(**arguments)
    assert engine.describe()["num_steps"] == steps
    assert engine.generate("a", max_tokens=2)[0].finish_reason in ("length", "stop")


def test_calls_of_tools_are_read_out_of_the_text(embedded):
    engine = embedded(max_num_seqs=4)
    parameters = {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": parameters}}]
    chat = [{"role": "user", "content": "What time is it?"}]
    options = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    (one,) = engine.chat(chat, **options)
    (call,) = one.tool_calls
    assert call["function"]["name"] == "get_time"
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    assert one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert engine.chat(chat, **options, num_speculative_tokens=0)[0].text == one.text
    assert engine.chat(chat, temperature=0, max_tokens=4)[0].tool_calls is None
    assert engine.chat(chat, tools=tools, temperature=0, max_tokens=4)[0].tool_calls == []
