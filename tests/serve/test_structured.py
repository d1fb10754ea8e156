"""response_format, tools, tool_choice and parallel_tool_calls over HTTP: valid output, the same with speculation on and off, streamed and whole."""

import json
import re

import jsonschema
import pytest
from openai import OpenAI

MODEL = "dflash2-embedded"
MESSAGES = [{"role": "user", "content": "Write a short story about a pony named Anna."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["pony", "horse"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMATS = {
    "schema": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}},
    "regex": {"type": "regex", "regex": "(yes|no), [a-z]{3,9} [0-9]{2}"},
    "object": {"type": "json_object"},
}
LAWS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 8}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 10}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"enum": ["UTC", "CET"]}},
                "required": ["zone"],
                "additionalProperties": False,
            },
        },
    },
]


@pytest.fixture
def client(idle):
    return OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", FORMATS)
def test_outputs_have_their_form_with_and_without_speculation(client, form, law):
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 120, "response_format": FORMATS[form], **LAWS[law]}
    on = client.chat.completions.create(**options)
    off = client.chat.completions.create(**options, extra_body={"speculative": {"enabled": False}})
    text = on.choices[0].message.content
    assert text == off.choices[0].message.content
    stats = on.model_extra["metrics"]["speculative_decoding"]
    assert stats["num_spec_steps"] > 0
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    if on.choices[0].finish_reason == "stop":
        if form == "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif form == "object":
            assert isinstance(json.loads(text), dict)
        else:
            assert re.fullmatch(FORMATS["regex"]["regex"], text)
    assert on.choices[0].finish_reason == "stop" or form == "object"


def test_drafts_inside_a_form_are_accepted(client):
    """A form that the drafter would write anyway."""
    options = {"model": MODEL, "prompt": "def add(a, b):\n", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**options).choices[0].text
    form = {"type": "regex", "regex": "[^\\x00]{10,200}"}
    held = client.completions.create(**options, extra_body={"response_format": form})
    assert held.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert held.choices[0].text.startswith(free)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("law", LAWS)
def test_calls_are_made_and_parsed(client, choice, law):
    options = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 160,
        **LAWS[law],
    }
    on = client.chat.completions.create(**options).choices[0]
    off = client.chat.completions.create(**options, extra_body={"speculative": {"enabled": False}}).choices[0]
    assert on.finish_reason == "tool_calls"
    (call,) = on.message.tool_calls
    assert on.message.content is None
    assert call.function.name == off.message.tool_calls[0].function.name
    assert call.function.arguments == off.message.tool_calls[0].function.arguments
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), schema)
    pieces, reason, names = "", None, []
    for chunk in client.chat.completions.create(**options, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.index == 0
            names += [piece.function.name] if piece.function.name else []
            pieces += piece.function.arguments
    assert (pieces, reason, names) == (call.function.arguments, "tool_calls", [call.function.name])


def test_auto_and_none_answer_freely_and_a_conversation_with_calls_is_taken(client):
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=8, temperature=0
        )
        assert answer.choices[0].message.content
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    assert client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS, max_tokens=4).choices[0].message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_fields_are_named(idle, body, param):
    answer = idle.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
