"""Every call style of the official `openai` client against a real service."""

import asyncio
import json
from collections import defaultdict
from typing import Literal

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel

MODEL = "dflash2-embedded"
CHAT = [{"role": "user", "content": "Write a short story about a pony named Anna."}]
GREEDY = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 40}
PROMPT = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}


class Weather(BaseModel):
    """A finite language, so that a tiny model finishes it."""

    sky: Literal["clear", "cloudy", "dark"]
    warm: bool


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "report_weather",
        "description": "Report the weather.",
        "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
        "strict": True,
    },
}


@pytest.fixture
def client(idle):
    with OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- models, headers, raw responses ---------------------------------------------------------------------------------


def test_models(client):
    page = client.models.list()
    assert [model.id for model in page] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_raw_response_has_the_headers(client):
    raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_headers={"x-request-id": "raw-1"})
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == raw.request_id == "raw-1"
    assert raw.headers["content-type"].startswith("application/json")
    assert float(raw.headers["openai-processing-ms"]) > 0
    assert raw.headers["x-dflash2-speculation"].startswith("on")
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.model == MODEL
    assert answer._request_id == "raw-1"


def test_speculation_header_tells_the_reason(client):
    raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_body={"speculative": {"enabled": False}})
    assert raw.headers["x-dflash2-speculation"] == "off; reason=requested"


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_streaming_response_is_server_sent_events(client, route):
    call, asked = (client.chat.completions, GREEDY) if route == "chat" else (client.completions, PROMPT)
    with call.with_streaming_response.create(**asked, stream=True) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        lines = list(response.iter_lines())
    assert all(line == "" or line.startswith("data: ") for line in lines)
    assert not any(lines[1::2]), "one data line, one blank line"
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert len(lines) > 6


def test_streaming_response_of_a_whole_answer(client):
    with client.chat.completions.with_streaming_response.create(**GREEDY) as response:
        body = json.loads(b"".join(response.iter_bytes()))
    assert body["object"] == "chat.completion"


# ---- text -----------------------------------------------------------------------------------------------------------


def test_chat_stream_joins_to_the_whole(client):
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    first, *rest, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == whole.choices[0].message.content
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert not last.choices[0].delta.content
    assert (usage.choices, usage.usage.total_tokens) == ([], whole.usage.total_tokens)
    assert usage.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (first.id, first.created, MODEL, "chat.completion.chunk")
    }


def test_stream_helper(client):
    asked = {**GREEDY, "max_tokens": 400}  # to its end: the helper raises for an answer that was cut
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_completions_in_every_form_of_prompt(client):
    text = client.completions.create(**PROMPT, extra_body={"return_token_ids": True})
    ids = client.completions.create(**{**PROMPT, "prompt": "Once"}, extra_body={"return_token_ids": True})
    assert text.choices[0].text
    assert ids.choices[0].model_extra["token_ids"]
    both = client.completions.create(**{**PROMPT, "prompt": [PROMPT["prompt"], "Once"]})
    assert [choice.text for choice in both.choices] == [text.choices[0].text, ids.choices[0].text]
    pieces = list(client.completions.create(**PROMPT, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == text.choices[0].text
    assert pieces[-1].usage.total_tokens == text.usage.total_tokens


def test_async_client(idle):
    async def ask():
        async with AsyncOpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0) as client:
            wholes = await asyncio.gather(*(client.chat.completions.create(**GREEDY) for _ in range(3)))
            stream = await client.chat.completions.create(**GREEDY, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [whole.choices[0].message.content for whole in wholes], text

    texts, streamed = asyncio.run(ask())
    assert set(texts) == {streamed}


def test_closing_a_stream_frees_the_request(client):
    """`idle` finds the engine empty afterwards."""
    stream = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


# ---- options --------------------------------------------------------------------------------------------------------


def test_n_choices(client):
    asked = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1, "choices of one seed are draws of their own"
    one = client.chat.completions.create(**{**asked, "n": 1})
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens, "one prompt, counted once"
    streamed = defaultdict(str)
    ends = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert [streamed[index] for index in range(3)] == texts
    assert [ends[index] for index in range(3)] == [choice.finish_reason for choice in whole.choices]


def test_n_of_completions_counts_prompt_by_prompt(client):
    asked = {**PROMPT, "prompt": ["Once upon a time", "import os"], "max_tokens": 5, "n": 2}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in whole.choices]
    assert texts[0] == texts[1], "greedy choices are equal"
    assert texts[2] == texts[3]
    assert texts[0] != texts[2]


def test_chat_logprobs(client):
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole.choices[0].message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= 0
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0]), "greedy takes the first"
    plain = client.chat.completions.create(**asked, extra_body={"speculative": {"enabled": False}})
    pairs = zip(entries, plain.choices[0].logprobs.content, strict=True)
    assert all(abs(fast.logprob - slow.logprob) < 1e-3 for fast, slow in pairs)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    bare = client.chat.completions.create(**{**asked, "top_logprobs": 0})
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * len(entries)


def test_completion_logprobs(client):
    whole = client.completions.create(**PROMPT, logprobs=2)
    choice = whole.choices[0]
    count = whole.usage.completion_tokens
    assert (
        len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == count
    )
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    tokens = [
        token
        for piece in client.completions.create(**PROMPT, logprobs=2, stream=True)
        for one in piece.choices
        if one.logprobs
        for token in one.logprobs.tokens
    ]
    assert tokens == choice.logprobs.tokens


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_stop_strings(client, route):
    """The text ends before the stop string, whole and streamed, and no chunk leaks its beginning."""

    def ask(**options):
        if route == "completions":
            return client.completions.create(**{**PROMPT, **options})
        return client.chat.completions.create(**{**GREEDY, **options})

    def text_of(choice):
        return (
            choice.text
            if route == "completions"
            else (choice.delta if hasattr(choice, "delta") else choice.message).content or ""
        )

    full = text_of(ask().choices[0])
    stop = full[len(full) // 2 : len(full) // 2 + 5]
    expected = full[: full.index(stop)]
    for stops in (stop, ["never in it", stop], ["1", "2", "3", stop]):
        cut = ask(stop=stops).choices[0]
        assert (text_of(cut), cut.finish_reason, cut.model_extra["stop_reason"]) == (expected, "stop", stop)
    joined, reasons = "", []
    for chunk in ask(stop=[stop], stream=True):
        for choice in chunk.choices:
            joined += text_of(choice)
            assert expected.startswith(joined)
            reasons.append(choice.finish_reason)
    assert (joined, reasons[-1]) == (expected, "stop")


def test_logit_bias_and_penalties_change_the_answer_and_stay_exact(client):
    free = client.completions.create(**PROMPT, extra_body={"return_token_ids": True})
    ids = free.choices[0].model_extra["token_ids"]
    banned = client.completions.create(**PROMPT, logit_bias={str(ids[0]): -100}, extra_body={"return_token_ids": True})
    assert ids[0] not in banned.choices[0].model_extra["token_ids"]
    forced = client.completions.create(**PROMPT, logit_bias={str(ids[0]): 100}, extra_body={"return_token_ids": True})
    assert set(forced.choices[0].model_extra["token_ids"]) == {ids[0]}
    for option in ({"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"extra_body": {"repetition_penalty": 1.4}}):
        own = dict(option.pop("extra_body", {}))
        fast = client.completions.create(**{**PROMPT, **option, "max_tokens": 60}, extra_body=own)
        plain = client.completions.create(
            **{**PROMPT, **option, "max_tokens": 60}, extra_body={**own, "speculative": {"enabled": False}}
        )
        assert fast.choices[0].text == plain.choices[0].text


def test_echo_is_exact_or_refused(idle):
    answer = idle.http.post("/v1/completions", json={**PROMPT, "echo": True})
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "echo"
    else:
        assert answer.json()["choices"][0]["text"].startswith(PROMPT["prompt"])


def test_fields_without_effect_and_unknown_fields(client):
    plain = client.chat.completions.create(**GREEDY)
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY, user="someone", metadata={"a": "b"}, store=False, extra_body={"made_up_field": 1}
    )
    assert raw.parse().choices == plain.choices
    assert raw.headers["x-dflash2-ignored-fields"] == "made_up_field"
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(**PROMPT, extra_body={"best_of": 3})
    assert caught.value.param == "best_of"


def test_meta_info_for_those_who_ask(client):
    answer = client.chat.completions.create(**GREEDY, extra_body={"return_meta_info": True, "chat_template_kwargs": {}})
    for meta in (answer.model_extra["meta_info"], answer.choices[0].model_extra["meta_info"]):
        assert meta["spec_verify_ct"] == answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
        assert meta["spec_accept_length"] == pytest.approx(answer.usage.completion_tokens / meta["spec_verify_ct"])


# ---- tools and structured output ------------------------------------------------------------------------------------


def test_tools_auto_leave_text_alone(client):
    answer = client.chat.completions.create(**GREEDY, tools=[WEATHER_TOOL])
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    assert (
        not client.chat.completions.create(**GREEDY, tools=[WEATHER_TOOL], tool_choice="none")
        .choices[0]
        .message.tool_calls
    )


CHOICES = ["required", {"type": "function", "function": {"name": "report_weather"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
def test_a_tool_must_be_called(client, choice):
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 200}, tools=[WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False
    )
    chosen = answer.choices[0]
    calls = chosen.message.tool_calls
    assert chosen.finish_reason == "tool_calls" or (choice != "required" and chosen.finish_reason == "stop")
    assert not chosen.message.content
    assert all((call.type, call.function.name) == ("function", "report_weather") and call.id for call in calls)
    assert all(Weather.model_validate_json(call.function.arguments) for call in calls)
    follow_up = [
        *CHAT,
        chosen.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls),
    ]
    after = client.chat.completions.create(model=MODEL, messages=follow_up, tools=[WEATHER_TOOL], max_tokens=4)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
def test_streamed_tool_calls(client, choice):
    asked = {**GREEDY, "max_tokens": 200, "tools": [WEATHER_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    names, ids, arguments = {}, {}, defaultdict(str)
    reasons = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (piece,) = chunk.choices
        reasons.append(piece.finish_reason)
        assert not piece.delta.content
        for call in piece.delta.tool_calls or []:
            if call.index not in ids:
                assert call.type == "function"
                ids[call.index], names[call.index] = call.id, call.function.name
            else:
                assert call.id in (None, ids[call.index]), "the id comes once"
                assert call.function.name is None, "the name comes once"
            arguments[call.index] += call.function.arguments or ""
    assert reasons[-1] == whole.finish_reason
    assert list(names) == list(range(len(whole.message.tool_calls)))
    assert [arguments[index] for index in names] == [call.function.arguments for call in whole.message.tool_calls]
    assert set(names.values()) == {"report_weather"}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert [call.function.parsed_arguments for call in final.choices[0].message.tool_calls] == [
        json.loads(call.function.arguments) for call in whole.message.tool_calls
    ]


def test_parse_into_a_pydantic_model(client):
    asked = {**GREEDY, "max_tokens": 200, "response_format": Weather}
    parsed = client.chat.completions.parse(**asked)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": {**Weather.model_json_schema(), "additionalProperties": False}},
    }
    plain = client.chat.completions.create(
        **{**asked, "response_format": schema}, extra_body={"speculative": {"enabled": False}}
    )
    assert plain.choices[0].message.content == parsed.choices[0].message.content


def test_json_object(client):
    answer = client.chat.completions.create(**{**GREEDY, "max_tokens": 300}, response_format={"type": "json_object"})
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [WEATHER_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"n": 0}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop": [5]}, "stop"),
    ],
    ids=str,
)
def test_bad_options_are_named(client, options, param):
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{**GREEDY, **options})
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param.split(".")[0].split("[")[0] == param
