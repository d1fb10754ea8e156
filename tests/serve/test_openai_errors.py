"""Failures as the official client sees them: class, code, param, type, and when it asks again."""

import os
import threading
import time

import openai
import pytest
from openai import OpenAI

MODEL = "dflash2-embedded"
HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEY = "sk-conformance-1"


@pytest.fixture
def client(idle):
    with OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def is_ours(response):
    """Whether a body is the OpenAI error object, with exactly its four fields."""
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("change", "kind", "code", "param"),
    [
        ({"temperature": "hot"}, openai.BadRequestError, None, "temperature"),
        ({"temperature": -0.5}, openai.BadRequestError, None, "temperature"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, openai.BadRequestError, None, "messages"),
        ({"max_tokens": -1}, openai.BadRequestError, None, "max_tokens"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "context_length_exceeded", "messages"),
        (
            {"messages": [{"role": "user", "content": "word " * 3000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_classes(client, change, kind, code, param, stream):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**HI, **change}, stream=stream)
    error = caught.value
    assert (type(error), error.code, error.type) == (kind, code, "invalid_request_error")
    assert error.param.split(".")[0].split("[")[0] == param
    assert error.request_id


def test_context_length_gives_both_numbers_and_its_param(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 2000, max_tokens=49)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "2048" in caught.value.message
    assert "2049" in caught.value.message or ("2000" in caught.value.message and "49" in caught.value.message)


def test_routes_methods_and_broken_bodies(idle):
    cases = [
        ("GET", "/v1/nope", {}, 404),
        ("GET", "/v1/models/nope", {}, 404),
        ("DELETE", "/v1/completions", {}, 405),
        ("POST", "/v1/completions", {"content": b"{"}, 400),
        ("POST", "/v1/chat/completions", {"content": b""}, 400),
        ("POST", "/v1/chat/completions", {"json": ["a"]}, 400),
        ("POST", "/tokenize", {"content": b"{"}, 400),
        ("POST", "/tokenize", {"json": {}}, 400),
        ("POST", "/detokenize", {"json": {"tokens": ["a"]}}, 400),
        ("POST", "/detokenize", {"json": {"tokens": [10**9]}}, 400),
    ]
    for method, path, options, status in cases:
        answer = idle.http.request(method, path, **options)
        assert answer.status_code == status, (method, path)
        assert is_ours(answer)["type"] == "invalid_request_error"
    allow = idle.http.get("/v1/completions").headers["allow"]
    assert "POST" in allow


def test_a_huge_body_is_a_413(idle):
    answer = idle.http.post("/v1/completions", content=b'{"prompt": "' + b"x" * (40 << 20) + b'"}')
    assert answer.status_code == 413
    assert is_ours(answer)["code"] == "request_too_large"


def test_tokenize_and_back(idle):
    body = idle.http.post("/tokenize", json={"model": MODEL, "prompt": "import os", "add_special_tokens": False}).json()
    assert body["count"] == len(body["tokens"]) > 0
    assert body["max_model_len"] == 2048
    back = idle.http.post("/detokenize", json={"model": MODEL, "tokens": body["tokens"]}).json()
    assert back["prompt"] == "import os"
    chat = idle.http.post("/tokenize", json={"model": MODEL, "messages": HI["messages"]}).json()
    asked = idle.http.post("/v1/chat/completions", json=HI).json()
    assert chat["count"] == asked["usage"]["prompt_tokens"]


@pytest.fixture
def full(idle):
    """The service with every place taken by a stream. Gives the function that ends them all."""
    config = idle.http.get("/server_info").json()["config"]
    places = config["max_num_seqs"] + config["max_queued_requests"]
    released = threading.Event()
    body = {**HI, "max_tokens": 2000, "stream": True, "ignore_eos": True, "speculative": {"enabled": False}}

    def hold():
        with idle.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if released.is_set():
                    return

    threads = [threading.Thread(target=hold, daemon=True) for _ in range(places)]
    for thread in threads:
        thread.start()
    idle.wait_for(lambda info: info["num_requests_in_flight"] >= places)
    yield released.set
    released.set()
    for thread in threads:
        thread.join(60)


def test_rate_limit(full, idle):
    with (
        OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.chat.completions.create(**HI)
    error = caught.value
    assert (error.type, error.code) == ("rate_limit_error", "queue_full")
    assert int(error.response.headers["retry-after"]) >= 1
    assert int(error.response.headers["retry-after-ms"]) > 0
    is_ours(error.response)


def test_client_asks_again_after_retry_after_ms(full, idle):
    """Refused once; then the places become free; the client's own next try is answered, not before the time that we named."""
    seen = []

    def look(response):
        seen.append((response.status_code, time.monotonic(), response.headers.get("retry-after-ms")))
        full()

    http = openai.DefaultHttpxClient(event_hooks={"response": [look]})
    with OpenAI(base_url=idle.url + "/v1", api_key="none", max_retries=8, http_client=http) as client:
        raw = client.chat.completions.with_raw_response.create(**HI)
    assert raw.status_code == 200
    assert raw.retries_taken == len(seen) - 1 >= 1
    (status, refused, wait), (_, again, _) = seen[:2]
    assert status == 429
    assert again - refused >= int(wait) / 1000 - 0.05


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(service, tmp_path_factory):
    """Base address of a service that asks for keys: a second application beside the first."""
    if "DFLASH2_URL" in os.environ:
        if "DFLASH2_KEYED_URL" not in os.environ:
            pytest.skip("this service asks for no keys (DFLASH2_KEYED_URL)")
        yield os.environ["DFLASH2_KEYED_URL"]
        return
    from ray import serve

    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{KEY}\n")
    settings = {**service.settings, "api_keys_file": str(keys)}
    serve.run(app(ServiceConfig(**settings)), name="keyed", route_prefix="/keyed")
    yield service.url + "/keyed"
    serve.delete("keyed")


@pytest.mark.parametrize(
    "key", ["sk-wrong", "", "é", KEY + "x", KEY[:-1]], ids=["wrong", "empty", "not-ascii", "longer", "shorter"]
)
def test_a_wrong_key_is_a_401(keyed, service, key):
    answer = service.http.post(
        f"{keyed}/v1/chat/completions", json=HI, headers={"authorization": f"Bearer {key}".strip().encode()}
    )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = is_ours(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert not key or key not in answer.text


def test_keys_with_the_client(keyed):
    with OpenAI(base_url=keyed + "/v1", api_key="sk-wrong", max_retries=0) as client:
        for call in (client.models.list, lambda: client.chat.completions.create(**HI)):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
    with OpenAI(base_url=keyed + "/v1", api_key=KEY, max_retries=0) as client:
        assert client.chat.completions.create(**HI).choices
        assert [model.id for model in client.models.list()] == [MODEL]


def test_what_needs_no_key(keyed, service):
    """Probes of a load balancer carry no key."""
    assert service.http.get(f"{keyed}/health").status_code == 200
    assert service.http.get(f"{keyed}/ready").status_code == 200
    assert service.http.get(f"{keyed}/v1/models").status_code == 401
