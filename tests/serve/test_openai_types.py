"""Our bodies, read strictly by the pydantic types of the official client: required fields, exact types, no unknown names."""

import json

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0, "max_tokens": 12}
PROMPT = {"prompt": "import os", "temperature": 0, "max_tokens": 12}
EXTENSIONS = {  # what we add to OpenAI's objects, by the type that carries it
    "ChatCompletion": {"metrics", "meta_info"},
    "ChatCompletionChunk": {"metrics"},
    "Completion": {"metrics", "meta_info"},
    "Choice": {"stop_reason", "token_ids", "metrics", "meta_info"},
    "CompletionChoice": {"stop_reason", "token_ids", "metrics", "meta_info"},
    "Model": {"max_model_len", "root", "parent", "permission"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}
SHAPES = [
    ("chat/completions", CHAT),
    ("chat/completions", {**CHAT, "return_token_ids": True}),
    ("chat/completions", {**CHAT, "n": 2}),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**CHAT, "max_tokens": 100, "tools": [TOOL], "tool_choice": "required"}),
    ("completions", PROMPT),
    ("completions", {**PROMPT, "prompt": ["a", "b"]}),
    ("completions", {**PROMPT, "logprobs": 2}),
]


def strictly(kind, body):
    """`body` as `kind`: every required field there, no coercion, and only extra fields that we mean to send."""
    model = kind.model_validate_json(json.dumps(body), strict=True)
    stack = [model]
    while stack:
        one = stack.pop()
        if isinstance(one, BaseModel):
            extra = set(one.model_extra or {})
            assert extra <= EXTENSIONS.get(type(one).__name__, set()), f"{type(one).__name__} carries unknown {extra}"
            stack.extend(getattr(one, name) for name in type(one).model_fields)
        elif isinstance(one, (list, tuple)):
            stack.extend(one)
    return model


@pytest.mark.parametrize(("route", "body"), SHAPES, ids=lambda value: str(value)[-48:])
def test_whole_answers(idle, route, body):
    answer = idle.http.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    read = strictly(ChatCompletion if "chat" in route else Completion, answer.json())
    assert read.usage.total_tokens == read.usage.prompt_tokens + read.usage.completion_tokens
    if "chat" in route:
        assert all(choice.message.role == "assistant" for choice in read.choices)
        assert all("content" in choice["message"] for choice in answer.json()["choices"]), (
            "content is there, null with tool calls"
        )


@pytest.mark.parametrize(("route", "body"), SHAPES, ids=lambda value: str(value)[-48:])
def test_streams(idle, route, body):
    answer = idle.http.post(f"/v1/{route}", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200, answer.text
    frames = [json.loads(frame.removeprefix("data: ")) for frame in answer.text.split("\n\n")[:-2]]
    assert answer.text.endswith("data: [DONE]\n\n")
    for frame in frames:
        if "chat" in route:
            strictly(ChatCompletionChunk, frame)
            continue
        for choice in frame["choices"]:
            assert choice["finish_reason"] in (None, "stop", "length")
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # OpenAI's own type knows no unfinished piece
        strictly(Completion, frame)
    assert [frame["usage"] is None for frame in frames] == [True] * (len(frames) - 1) + [False]


def test_metrics_agree_with_themselves(idle):
    """What AIPerf checks: one entry per possible acceptance, and sums that agree."""
    info = idle.http.get("/server_info").json()
    for body in (
        {**CHAT, "max_tokens": 90, "ignore_eos": True},
        {**CHAT, "speculative": {"num_speculative_tokens": 2}},
    ):
        answer = idle.http.post("/v1/chat/completions", json=body).json()
        stats = answer["metrics"]["speculative_decoding"]
        histogram = stats["acceptance_histogram"]
        assert len(histogram) == stats["num_spec_tokens"] + 1
        assert sum(histogram) == stats["num_spec_steps"] > 0
        assert sum(index * count for index, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
        assert stats["draft_acceptance_rate"] == pytest.approx(
            stats["num_accepted_draft_tokens"] / stats["num_draft_tokens"]
        )
        assert stats["mean_acceptance_length"] == pytest.approx(
            1 + stats["num_accepted_draft_tokens"] / stats["num_spec_steps"]
        )
        assert {"enabled", "skipped_reason", "emitted_accepted_tokens"} <= set(stats)
        assert answer["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens") is None
    assert info["version"]


def test_model_list(idle):
    body = idle.http.get("/v1/models").json()
    assert body["object"] == "list"
    (model,) = (strictly(Model, one) for one in body["data"])
    assert body["data"][0]["root"], "`vllm bench serve` reads it"
    assert model.created > 1_700_000_000
