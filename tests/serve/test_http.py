"""The HTTP contract on a real service: OpenAI bodies, streams, errors, and answers equal to the engine's own."""

import json

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

MODEL = "dflash2-embedded"
CHAT = [{"role": "user", "content": "Write a short story about a pony named Anna."}]


@pytest.fixture
def client(idle):
    return OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0)


def events(response):
    """JSON objects of a finished event stream, which must end with [DONE]."""
    frames = [frame for frame in response.text.split("\n\n") if frame]
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def test_facts(idle):
    assert idle.http.get("/health").status_code == 200
    assert idle.http.get("/ready").status_code == 200
    (model,) = idle.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 2048)
    info = idle.http.get("/server_info").json()
    assert info["config"]["max_num_seqs"] == idle.settings["max_num_seqs"]
    assert "/v1/chat/completions" in idle.http.get("/openapi.json").json()["paths"]


def test_chat_is_the_engines_answer(client, engine):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=60)
    (expected,) = engine.chat(CHAT, temperature=0, max_tokens=60)
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason == "length"
    assert answer.usage.completion_tokens == 60
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 60
    stats = answer.model_extra["metrics"]["speculative_decoding"]
    assert stats["acceptance_histogram"] == expected.metrics["speculative_decoding"]["acceptance_histogram"]
    assert stats["num_accepted_draft_tokens"] > 0


def test_stream_is_the_whole_answer_in_pieces(client):
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=1.0, seed=5, max_tokens=80)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        temperature=1.0,
        seed=5,
        max_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16 > 0
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_with_several_prompts(client, engine):
    prompts = ["def add(a, b):\n", "Once upon a time", "import os"]
    answer = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=12)
    expected = engine.generate(prompts, temperature=0, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in expected)
    stream = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=12, stream=True)
    texts = dict.fromkeys(range(3), "")
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [one.text for one in expected]


def test_token_ids_in_and_out(idle, engine):
    ids = engine.tokenizer.encode("import os")
    body = {"prompt": ids, "temperature": 0, "max_tokens": 9, "return_token_ids": True}
    answer = idle.http.post("/v1/completions", json=body).json()
    (expected,) = engine.generate(prompt_token_ids=ids, temperature=0, max_tokens=9)
    assert answer["choices"][0]["token_ids"] == expected.token_ids
    streamed = events(idle.http.post("/v1/completions", json={**body, "stream": True}))
    assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == expected.token_ids


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_streams_give_each_token_id_once_and_running_counts(idle, route):
    asked = {"prompt": "import os"} if route == "completions" else {"messages": CHAT}
    body = {**asked, "temperature": 0, "max_tokens": 30, "return_token_ids": True}
    whole = idle.http.post(f"/v1/{route}", json=body).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = [
        p
        for p in events(idle.http.post(f"/v1/{route}", json={**body, "stream": True, "stream_options": options}))
        if p["choices"]
    ]
    ids = [token for piece in pieces for token in piece["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    counted = [piece for piece in pieces if "token_ids" in piece["choices"][0]]
    seen = 0
    for piece in counted:
        seen += len(piece["choices"][0]["token_ids"])
        prompt = whole["usage"]["prompt_tokens"]
        cached = {"cached_tokens": (prompt - 1) // 16 * 16}  # the second time
        assert piece["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": seen,
            "total_tokens": prompt + seen,
            "prompt_tokens_details": cached,
        }
    assert len(counted) > 2


@pytest.mark.parametrize("how", ["body", "header"])
def test_speculation_per_request(idle, how):
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 40}
    plain_body, headers = dict(body), {}
    if how == "body":
        plain_body["speculative"] = {"enabled": False}
    else:
        headers["x-dflash2-speculative"] = "off"
    fast = idle.http.post("/v1/chat/completions", json=body).json()
    plain = idle.http.post("/v1/chat/completions", json=plain_body, headers=headers).json()
    assert plain["choices"][0]["message"] == fast["choices"][0]["message"]
    stats = plain["metrics"]["speculative_decoding"]
    assert (stats["enabled"], stats["skipped_reason"], stats["num_spec_steps"]) == (False, "requested", 0)
    assert fast["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    three = {**body, "speculative": {"num_speculative_tokens": 3}}
    narrow = idle.http.post("/v1/chat/completions", json=three).json()
    assert narrow["choices"][0]["message"] == fast["choices"][0]["message"]
    assert narrow["metrics"]["speculative_decoding"]["acceptance_histogram"][4:] == [0] * 4


def test_stop_tokens_and_end_of_text(idle, engine):
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 400}
    full = idle.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (full["finish_reason"], full["stop_reason"]) == ("stop", None)
    assert "<|im_end|>" not in full["message"]["content"]
    (reference,) = engine.chat(CHAT, temperature=0, max_tokens=40)
    stop = reference.token_ids[17]
    at = reference.token_ids.index(stop)
    cut = idle.http.post("/v1/chat/completions", json={**body, "stop_token_ids": [stop]}).json()
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] == at + 1
    assert cut["choices"][0]["message"]["content"] == engine.tokenizer.decode(reference.token_ids[:at])


BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [""]}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": None}, "prompt", None),
    ({}, "prompt", None),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [2048]}, "prompt", "2048"),
    ({"prompt": [2**63]}, "prompt", str(2**63)),
    ({"prompt": [1.5]}, "prompt", "1.5"),
    ({"prompt": [True]}, "prompt", "True"),
    ({"prompt": [[1, 2], [3, 9999]]}, "prompt", "9999"),
    ({"prompt": {"a": 1}}, "prompt", None),
    ({"prompt": ["a", 1]}, "prompt", None),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "hot"),
    ({"prompt": "a", "temperature": -0.1}, "temperature", "-0.1"),
    ({"prompt": "a", "top_p": 0}, "top_p", "0"),
    ({"prompt": "a", "top_k": 1.5}, "top_k", "1.5"),
    ({"prompt": "a", "min_p": 2}, "min_p", "2"),
    ({"prompt": "a", "seed": "x"}, "seed", "x"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "0"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "True"),
    ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids", "99999"),
    ({"prompt": "a", "stop_token_ids": 7}, "stop_token_ids", "7"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos", "1"),
    ({"prompt": "a", "stream": "yes"}, "stream", "yes"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", None),
    ({"prompt": "a", "speculative": {"enabled": 1}}, "speculative.enabled", "1"),
    ({"prompt": "a", "speculative": {"draft": "x"}}, "speculative", "draft"),
    ({"prompt": "a", "n": 0}, "n", "0"),
    ({"prompt": "a", "n": 1000}, "n", "1000"),
    ({"prompt": "a", "stop": ["x", ""]}, "stop", "empty"),
    ({"prompt": "a", "stop": [5]}, "stop", None),
    ({"prompt": "a", "logprobs": True}, "logprobs", "True"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "21"),
    ({"prompt": "a", "top_logprobs": 1}, "top_logprobs", None),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "x"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "101"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", None),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "9"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words", "empty"),
    ({"prompt": "a", "echo": 1}, "echo", "1"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"prompt": "a", "response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", None),
    (
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        },
        "response_format.json_schema.schema",
        "not",
    ),
    ({"prompt": "a", "tools": [{"type": "function"}]}, "tools", None),
    ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs", None),
    ({"prompt": "a", "guided_json": {}, "best_of": 3}, "best_of", "guided_json"),
    ({"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "mentions"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_input_is_a_400_that_names_the_field(service, body, param, mentions, stream):
    answer = service.http.post(
        "/v1/completions", json={**({"stream": True} if stream and "stream" not in body else {}), **body}
    )
    if stream and "stream_options" in body:
        assert answer.status_code == 200  # with stream it is a good request
        return
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert mentions is None or mentions in error["message"]


def test_the_service_goes_on_after_bad_input(idle):
    for content in (b"{", b"[1]", b"\xff", b'"text"', b'{"prompt": NaN}', b"[" * 5000):
        answer = idle.http.post("/v1/completions", content=content)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for messages in (
        [],
        [{}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": 5}],
        "hi",
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ):
        answer = idle.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400, messages
        assert answer.json()["error"]["param"] == "messages"
    assert idle.http.post("/v1/completions", json={"prompt": "ok", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_is_told_before_any_stream(client, stream):
    cases = [
        {"prompt": [5] * 2048, "max_tokens": 1},
        {"prompt": [5] * 5000, "max_tokens": 1},
        {"prompt": [5] * 2000, "max_tokens": 49},
        {"prompt": "a", "max_tokens": 10**12},
    ]
    for case in cases:
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model=MODEL, stream=stream, **case)
        assert caught.value.code == "context_length_exceeded"
        assert "2048" in str(caught.value)
    full = client.completions.create(model=MODEL, prompt=[5] * 2040, max_tokens=8, extra_body={"ignore_eos": True})
    assert full.usage.total_tokens == 2048


def test_unknown_model_route_and_method(client, idle):
    with pytest.raises(NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert MODEL in str(caught.value)
    for method, path, status in (
        ("GET", "/nope", 404),
        ("PUT", "/v1/completions", 405),
        ("GET", "/v1/completions", 405),
    ):
        answer = idle.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_neutral_values_of_other_options_are_accepted(idle):
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop": None,
        "logprobs": None,
        "echo": False,
        "user": "someone",
        "best_of": 1,
        "suffix": None,
    }
    assert idle.http.post("/v1/completions", json=body).status_code == 200


def test_half_a_surrogate_pair_is_a_400(idle):
    bodies = [
        b'{"prompt": "a\\ud800b"}',
        b'{"prompt": "a", "stop": ["\\uDFFF"]}',
        b'{"prompt": "a\xed\xa0\x80"}',
        b'{"prompt": "\xff"}',
    ]
    for body in bodies:
        answer = idle.http.post("/v1/completions", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (
        idle.http.post("/v1/completions", content=b'{"prompt": "\\ud83e\\udd99", "max_tokens": 1}').status_code == 200
    )


def test_request_id_is_echoed(idle):
    answer = idle.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "abc"})
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json()["id"] == "cmpl-abc"


def test_streams_never_split_a_character(idle, engine):
    """Random tokens of a byte-level vocabulary make broken bytes; the pieces still join to the whole text."""
    body = {"prompt": "🦙 é 日本", "temperature": 5.0, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    for seed in range(4):
        whole = idle.http.post("/v1/completions", json={**body, "seed": seed}).json()["choices"][0]
        pieces = events(idle.http.post("/v1/completions", json={**body, "seed": seed, "stream": True}))
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]
        assert engine.tokenizer.decode(whole["token_ids"]) == whole["text"]
