"""What stands before the routes: keys, body limit, CORS, time; over ASGI, with no service behind."""

import asyncio
import hashlib

import httpx
import pytest
from fastapi import FastAPI, Request

from dflash2_ray.config import ServiceConfig
from dflash2_ray.errors import ConfigError, Overloaded
from dflash2_ray.serving.api_keys import ApiKeys
from dflash2_ray.serving.body_limit import BodyLimit
from dflash2_ray.serving.early_refusal import EarlyRefusal
from dflash2_ray.serving.key_digests import CHECK_PERIOD_S, CurrentKeys, KeyDigests
from dflash2_ray.serving.processing_time import ProcessingTime
from dflash2_ray.serving.routes import GENERATING_PATHS, Guards, build_api


def call(app, method="POST", path="/echo", **options):
    async def one():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(one())


def echo(catches=False):
    api = FastAPI()

    @api.post("/echo")
    @api.get("/health")
    async def route(request: Request):
        try:
            return {"size": len(await request.body())}
        except Exception:
            if catches:
                return {"size": -1}
            raise

    return api


def digests(*keys):
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def keyed(*keys):
    return ApiKeys(echo(), CurrentKeys(KeyDigests(digests(*keys))))


@pytest.mark.parametrize("catches", [False, True])
def test_large_bodies_are_refused_announced_or_not(catches):
    app = BodyLimit(echo(catches), max_bytes=10)

    async def pieces(count):
        for _ in range(count):
            yield b"12345"

    assert call(app, content=b"x" * 10).json() == {"size": 10}
    assert call(app, content=pieces(2)).json() == {"size": 10}
    for content in (b"x" * 11, pieces(3)):
        answer = call(app, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert "10" in answer.json()["error"]["message"]


def test_keys_are_asked_for():
    app = keyed("one", "two")
    for key in ("one", "two"):
        assert call(app, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for headers in (
        {},
        {"Authorization": "Bearer three"},
        {"Authorization": "one"},
        {"Authorization": "Basic one"},
        {"Authorization": "Bearer "},
    ):
        answer = call(app, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "three" not in answer.text
    assert call(app, "GET", "/health").status_code == 200


def test_keys_come_from_file_and_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nalpha\n\nbe#ta\nalpha\n")
    assert KeyDigests.read(str(path), {}).all() == digests("alpha", "be#ta")
    assert KeyDigests.read(str(path), {"DFLASH2_API_KEYS": "gamma, ,alpha"}).all() == digests("gamma", "alpha", "be#ta")
    assert KeyDigests.read(None, {}).all() == ()
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="expected one key per line"):
        KeyDigests.read(str(path), {"DFLASH2_API_KEYS": "gamma"})
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyDigests.read(str(tmp_path / "absent"), {})


def opened(app, *keys):
    """Which of the keys open it."""
    return [key for key in keys if call(app, headers={"Authorization": f"Bearer {key}"}).status_code == 200]


def test_a_changed_key_file_is_followed(tmp_path, caplog):
    """Rotated as Kubernetes does, by a link; a file that is no good, or gone, changes nothing and is told once."""
    path = tmp_path / "keys"
    now = 0.0

    def rotate(text):
        nonlocal now
        target = tmp_path / f"keys-{now}"
        target.write_text(text)
        (tmp_path / "next").symlink_to(target)
        (tmp_path / "next").replace(path)
        now += CHECK_PERIOD_S

    rotate("old\n")
    deployed = KeyDigests.read(str(path), {"DFLASH2_API_KEYS": "scraper"})
    rotate("old\nnew\n")  # before this replica started
    app = ApiKeys(echo(), CurrentKeys(deployed, lambda: now))
    asked = ("old", "new", "scraper")
    assert opened(app, *asked) == ["old", "new", "scraper"]
    rotate("new\n")
    now -= CHECK_PERIOD_S / 2
    assert opened(app, *asked) == ["old", "new", "scraper"]  # not looked at yet
    now += CHECK_PERIOD_S / 2
    assert opened(app, *asked) == ["new", "scraper"]
    rotate("# none\n")
    path_gone = path.readlink()
    for broken in ("expected one key per line", "cannot be read: FileNotFoundError"):
        caplog.clear()
        for _ in range(3):
            assert opened(app, *asked) == ["new", "scraper"]
            now += CHECK_PERIOD_S
        (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert broken in told.message
        path_gone.unlink(missing_ok=True)
    rotate("newest\n")
    assert opened(app, *asked, "newest") == ["scraper", "newest"]
    assert "newest" not in caplog.text


def test_a_node_without_the_key_file_asks_for_the_deployed_keys(tmp_path, caplog):
    path = tmp_path / "keys"
    app = ApiKeys(echo(), CurrentKeys(KeyDigests((), digests("one"), str(path))))
    assert opened(app, "one", "two") == ["one"]
    assert caplog.text == ""


def test_cors_is_closed_unless_configured():
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    closed = call(build_api(), "OPTIONS", "/v1/completions", headers=asks)
    assert closed.status_code == 405
    assert not any(name.startswith("access-control") for name in closed.headers)
    api = build_api(Guards(KeyDigests(digests("k")), ("http://page",), 100))
    opened = call(api, "OPTIONS", "/v1/completions", headers=asks)
    assert (opened.status_code, opened.headers["access-control-allow-origin"]) == (200, "http://page")
    refused = call(api, path="/v1/completions", headers={"Origin": "http://page"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://page")
    other = call(api, path="/v1/completions", headers={"Origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


def test_the_time_to_the_headers_is_told():
    assert int(call(ProcessingTime(echo())).headers["openai-processing-ms"]) >= 0


def failing(**guards):
    """Our application with a route that raises."""
    api = build_api(Guards(**guards))

    @api.get("/broken")
    async def broken():
        raise ValueError("the user's own words")

    return api


def test_what_nobody_expected_is_a_500_without_a_word_of_the_user(caplog):
    api = failing(cors_origins=("http://page",))
    answer = call(api, "GET", "/broken", headers={"Origin": "http://page", "x-request-id": "r-1"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "The service failed on this request. Request id: r-1.",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert answer.headers["access-control-allow-origin"] == "http://page"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert "ValueError at" in caplog.text
    assert "own words" not in caplog.text


def test_head_is_get_without_a_body():
    api = build_api()
    answer = call(api, "HEAD", "/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert call(api, "HEAD", "/v1/completions").status_code == 405
    assert call(api, "HEAD", "/nope").status_code == 404
    assert call(api, "DELETE", "/metrics").headers["allow"] == "GET"


def test_keys_know_their_open_paths_behind_a_prefix():
    outer = FastAPI()
    outer.mount("/app", keyed("one"))
    assert call(outer, "GET", "/app/health").status_code == 200
    assert call(outer, "POST", "/app/echo").status_code == 401
    assert call(keyed("one"), "POST", "/app/health").status_code == 401


def test_an_early_refusal_is_a_429_before_the_body_and_behind_the_keys():
    refusals = [Overloaded("full", retry_after_s=2.4)]
    app = EarlyRefusal(keyed("one"), GENERATING_PATHS, lambda: refusals[0])
    for path in GENERATING_PATHS:
        answer = call(app, path=path, content=b"{")
        assert answer.status_code == 429
        assert answer.json() == {
            "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
        }
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "2400")
        assert call(app, "GET", path).status_code == 401  # what is no generation goes on
    assert call(app, path="/tokenize").status_code == 401
    refusals[0] = None
    assert call(app, path=GENERATING_PATHS[0]).status_code == 401
    locked = ApiKeys(
        EarlyRefusal(echo(), GENERATING_PATHS, lambda: Overloaded("full")), CurrentKeys(KeyDigests(digests("one")))
    )
    assert call(locked, path=GENERATING_PATHS[0]).status_code == 401
    assert call(locked, path=GENERATING_PATHS[0], headers={"Authorization": "Bearer one"}).status_code == 429


def test_every_route_documents_its_errors():
    for path, methods in build_api().openapi()["paths"].items():
        for method, route in methods.items():
            assert {"400", "401", "404", "405", "413", "429", "500", "503", "504"} <= set(route["responses"]), path
            assert method == "get" or "requestBody" in route


def test_config_keys():
    config = ServiceConfig.from_keys({"cors_origins": "http://a, http://b", "strict_fields": True, "max_body_bytes": 5})
    assert config.cors_origins == ("http://a", "http://b")
    assert ServiceConfig.from_keys({"strict_fields": "true"}).strict_fields
    for good in ("*", "http://localhost:3000", "https://a.example,null://x"):
        assert ServiceConfig.from_keys({"cors_origins": good}).cors_origins
    for origin in ("a.example", "https://a.example/", "https://a.example/x", "http://", "https://a?b", " "):
        with pytest.raises(ConfigError, match="cors_origins"):
            ServiceConfig.from_keys({"cors_origins": (origin,)})
    for bad in (
        {"max_queued_tokens": 0},
        {"strict_fields": "perhaps"},
        {"max_body_bytes": 0},
        {"max_body_bytes": True},
        {"request_timeout_s": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ServiceConfig.from_keys(bad)
