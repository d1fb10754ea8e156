"""Options over HTTP: bodies and joined streams with speculation on equal those with it off; shapes of what is told beside the text."""

import json
import math

import pytest
from openai import OpenAI

MODEL = "dflash2-embedded"
MESSAGES = [{"role": "user", "content": "Write a short story about a pony named Anna."}]
VARIED = [
    {},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"repetition_penalty": 1.3, "stop": ["e", "the"]},
    {"logit_bias": {"20": 5, "33": -100}, "n": 2, "temperature": 1.0, "seed": 1},
    {"stop": ["\n", "and", " a"], "include_stop_str_in_output": True, "logprobs": 0},
    {"min_tokens": 12, "stop": ["a", "e"]},
    {"bad_words": ["the", "a"], "min_p": 0.05, "temperature": 0.7, "seed": 9},
    {"allowed_token_ids": list(range(5, 300)), "return_token_ids": True},
    {"echo": True, "logprobs": 1},
]
PROMPTS = ["Once upon a time", "def add(a, b):\n", "🦙 é 日本 one two"]


def plain(body):
    """Without what tells one call from another: ids, times and the speculation fields."""
    if isinstance(body, dict):
        return {key: plain(value) for key, value in body.items() if key not in ("id", "created", "metrics")}
    return (
        [plain(one) for one in body] if isinstance(body, list) else round(body, 4) if isinstance(body, float) else body
    )


def joined(answer):
    """The whole body that the chunks of a stream make up."""
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    assert frames.count("[DONE]") == 1
    choices, usage = {}, None
    for body in map(json.loads, frames[:-1]):
        usage = body.get("usage") or usage
        for one in body["choices"]:
            choice = choices.setdefault(
                one["index"], {"index": one["index"], "text": "", "logprobs": None, "token_ids": []}
            )
            choice["text"] += one.get("text") or one.get("delta", {}).get("content") or ""
            choice["token_ids"] += one.get("token_ids") or []
            choice |= {key: one[key] for key in ("finish_reason", "stop_reason") if one.get(key) is not None}
            if one["logprobs"]:
                choice["logprobs"] = choice["logprobs"] or {key: [] for key in one["logprobs"] if key != "refusal"}
                for key in choice["logprobs"]:
                    choice["logprobs"][key] += one["logprobs"][key]
    return [choices[index] for index in sorted(choices)], usage


@pytest.mark.parametrize("options", VARIED, ids=lambda value: "+".join(value) or "greedy")
@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "code", "unicode"])
def test_on_equals_off_and_stream_equals_body(idle, prompt, options):
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **options}
    off = idle.http.post("/v1/completions", json={**body, "speculative": {"enabled": False}})
    on = idle.http.post("/v1/completions", json=body)
    assert (on.status_code, off.status_code) == (200, 200), on.text
    assert on.headers["x-dflash2-speculation"] == "on"
    assert off.headers["x-dflash2-speculation"] == "off; reason=requested"
    assert plain(on.json()) == plain(off.json())
    for choice in on.json()["choices"]:
        metrics = choice.get("metrics") or on.json()["metrics"]
        assert metrics["speculative_decoding"]["enabled"]
    choices, usage = joined(
        idle.http.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert usage == on.json()["usage"]
    for choice, whole in zip(choices, on.json()["choices"], strict=True):
        assert (choice["text"], choice["finish_reason"]) == (whole["text"], whole["finish_reason"])
        assert choice.get("stop_reason") == whole["stop_reason"]
        assert plain(choice["logprobs"]) == plain(whole["logprobs"])
        assert choice["token_ids"] == whole.get("token_ids", [])


def test_completion_logprobs_and_echo(idle):
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
    }
    (choice,) = idle.http.post("/v1/completions", json=body).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith("Once upon a time")
    assert "".join(told["tokens"]) == choice["text"]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(len(told["tokens"]))]
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])
    assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())
    named = idle.http.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True}).json()["choices"][0]
    assert named["logprobs"]["tokens"][-6:] == [f"token_id:{token}" for token in choice["token_ids"]]
    by_ids = idle.http.post("/v1/completions", json={**body, "prompt": [[5, 6, 7], [8, 9]], "logprobs": None}).json()
    assert len(by_ids["choices"]) == 2
    assert all(one["logprobs"] is None for one in by_ids["choices"])


def test_chat_logprobs_and_choices(idle):
    client = OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=1.0, seed=4, n=2, max_tokens=20, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        content = choice.logprobs.content
        assert len(content) == 20
        assert bytes(byte for one in content for byte in one.bytes).decode(errors="replace") == choice.message.content
        assert all(len(one.top_logprobs) == 3 and math.exp(one.logprob) <= 1 for one in content)
    assert answer.usage.completion_tokens == 40
    assert (
        answer.usage.prompt_tokens
        == client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage.prompt_tokens
    )
    metrics = [choice.model_extra["metrics"]["speculative_decoding"] for choice in answer.choices]
    assert sum(one["num_accepted_draft_tokens"] for one in metrics) > 0


def test_unknown_fields_are_reported_and_known_ones_refused(idle):
    body = {"prompt": "a", "max_tokens": 1, "zebra": 1, "apple": True, "nothing": None}
    answer = idle.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-dflash2-ignored-fields"] == "apple, zebra"
    odd = idle.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1, "\b\r\n\x7f": 1, "é\u2028": 1, "x" * 3000: 1}
    )
    assert odd.status_code == 200
    assert odd.headers["x-dflash2-ignored-fields"].startswith(r"\x08\r\n\x7f, xxx")
    refused = idle.http.post("/v1/completions", json={"prompt": "a", "guided_json": {}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_json")


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "max_tokens",
        "stop",
        "seed",
        "n",
        "logit_bias",
        "stream_options",
        "presence_penalty",
        "logprobs",
    ],
)
def test_b45_null_is_omitted_is_default(idle, name):
    defaults = {
        "temperature": 1.0,
        "top_p": 1,
        "max_tokens": 16,
        "stop": [],
        "n": 1,
        "logit_bias": {},
        "presence_penalty": 0,
    }
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 5, "seed": 1}
    body.pop(name, None)
    answers = [body, {**body, name: None}, *([{**body, name: defaults[name]}] if name in defaults else [])]
    texts = [idle.http.post("/v1/completions", json=one).json()["choices"][0]["text"] for one in answers]
    if name != "seed":  # without one the law is the same, not the text
        assert len(set(texts)) == 1 or name == "temperature"
    if name == "temperature":
        assert texts[0] == texts[1] == texts[2]


def test_strict_speculation_refuses_what_would_be_clamped(idle):
    body = {"prompt": "a", "max_tokens": 2, "speculative": {"num_speculative_tokens": 99, "strict": True}}
    answer = idle.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "speculative.num_speculative_tokens")
    assert "at most 7" in answer.json()["error"]["message"]
    for fine in (
        {"num_speculative_tokens": 7, "strict": True},
        {"enabled": False, "num_speculative_tokens": 99, "strict": True},
        {"strict": True},
    ):
        assert idle.http.post("/v1/completions", json={**body, "speculative": fine}).status_code == 200


def test_a_width_above_the_limit_is_clamped_and_told(idle):
    answer = idle.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 8, "speculative": {"num_speculative_tokens": 99}}
    )
    assert answer.headers["x-dflash2-speculation"] == "on; k=7; reason=clamped"


def test_what_tools_read(idle):
    """SGLang's meta_info and server state, vLLM's counters."""
    answer = idle.http.post(
        "/v1/completions",
        json={"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "return_meta_info": True},
    ).json()
    told, stats = answer["choices"][0]["meta_info"], answer["metrics"]["speculative_decoding"]
    assert told["spec_verify_ct"] == stats["num_spec_steps"] + stats["num_plain_steps"] > 0
    assert told["spec_accept_length"] == pytest.approx(20 / told["spec_verify_ct"])
    assert told["spec_num_correct_drafts"] == stats["num_accepted_draft_tokens"] > 0
    assert idle.http.get("/server_info").json()["internal_states"][0]["avg_spec_accept_length"] > 1
    text = idle.http.get("/metrics").text
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="dflash2-embedded"}' in text
    assert idle.http.head("/metrics").status_code == 200
