"""Keys, limits, deadline, strict fields and the token routes over a real service; nothing secret in its logs."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

KEY = "sk-marker-key-5c1d"
TEXT = "marker-text-93ab"
SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "seed": 7,
    "request_timeout_s": 3.0,
    "strict_fields": True,
    "max_body_bytes": 20000,
}


@pytest.fixture(scope="module")
def guarded(service, tmp_path_factory):
    from ray import serve

    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{KEY}\nsk-another\n")
    serve.run(app(ServiceConfig(**SETTINGS, api_keys_file=str(path))), name="guarded", route_prefix="/guarded")
    with httpx.Client(base_url=service.url + "/guarded", timeout=120) as http:
        yield SimpleNamespace(http=http, auth={"Authorization": f"Bearer {KEY}"}, keys=path)
    serve.delete("guarded")


def test_keys_open_the_service(guarded):
    body = {"prompt": "a", "max_tokens": 2}
    assert guarded.http.get("/health").status_code == 200
    assert guarded.http.get("/ready").status_code == 200
    for headers in ({}, {"Authorization": "Bearer no"}):
        for path in ("/v1/completions", "/v1/models", "/server_info", "/openapi.json", "/nope"):
            answer = guarded.http.request("POST" if "completions" in path else "GET", path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = guarded.http.post("/v1/completions", json=body, headers=guarded.auth)
    assert answer.status_code == 200
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert len(answer.headers.get_list("x-request-id")) == 1
    info = guarded.http.get("/server_info", headers=guarded.auth)
    assert KEY not in info.text


def test_limits_and_strict_fields(guarded):
    large = guarded.http.post("/v1/completions", json={"prompt": "a" * 30000}, headers=guarded.auth)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    strict = guarded.http.post("/v1/completions", json={"prompt": "a", "zebra": 1}, headers=guarded.auth)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "zebra")


def test_deadlines_end_requests(guarded):
    """More work than fits into the time, whatever the machine: many long answers at once."""

    async def flood():
        async with httpx.AsyncClient(base_url=str(guarded.http.base_url), timeout=120, headers=guarded.auth) as http:
            body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "temperature": 2.0}
            return await asyncio.gather(
                *(http.post("/v1/completions", json={**body, "stream": index % 2 == 0}) for index in range(12))
            )

    answers = asyncio.run(flood())
    late = [answer for answer in answers if answer.status_code == 504]
    assert late, "not one of them was late"
    for answer in late:
        assert answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
    for answer in answers:
        if answer.status_code == 200 and "text/event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
    assert (
        guarded.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=guarded.auth).status_code
        == 200
    )


def test_token_routes(idle, engine):
    told = idle.http.post("/tokenize", json={"prompt": "Hello 🦙", "return_token_strs": True}).json()
    assert told["tokens"] == engine.tokenizer.encode("Hello 🦙")
    assert (told["count"], told["max_model_len"], len(told["token_strs"])) == (
        len(told["tokens"]),
        2048,
        len(told["tokens"]),
    )
    assert idle.http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Hello 🦙"}
    messages = [{"role": "user", "content": "Hi"}]
    assert idle.http.post("/tokenize", json={"messages": messages}).json()["tokens"] == engine.chat_ids(messages)
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"prompt": "a", "zebra": 1}, "zebra"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [10**20]}, "tokens"),
    ):
        answer = idle.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


def test_no_key_and_no_text_in_the_logs(guarded, idle):
    import ray

    for body in (
        {"prompt": TEXT, "max_tokens": 2},
        {"prompt": TEXT, "temperature": TEXT},
        {"prompt": TEXT, "logit_bias": {TEXT: 1}},
        {"prompt": [TEXT, 1]},
        {"prompt": TEXT, "stop": [TEXT] * 100},
        {"prompt": TEXT * 900},
        {TEXT: 1, "prompt": "a"},
    ):
        guarded.http.post("/v1/completions", json=body, headers=guarded.auth)
        guarded.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}x"})
    for content in ([{"role": "user", "content": TEXT}], [{"role": TEXT, "content": TEXT}], TEXT):
        guarded.http.post("/v1/chat/completions", json={"messages": content, "max_tokens": 2}, headers=guarded.auth)
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    for path in logs.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content, path
            assert TEXT.encode() not in content, path


def test_a_changed_key_file_needs_no_restart(guarded):
    guarded.keys.write_text("sk-rotated\n")
    rotated = {"Authorization": "Bearer sk-rotated"}
    deadline = time.monotonic() + 60
    while guarded.http.get("/v1/models", headers=rotated).status_code == 401:
        assert time.monotonic() < deadline
    assert guarded.http.get("/v1/models", headers=guarded.auth).status_code == 401
