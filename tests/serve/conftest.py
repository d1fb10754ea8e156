"""A real local Ray with the service on it: one small service for the whole session, on a random port."""

import asyncio
import os
import time
from types import SimpleNamespace

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # replicas at priority 15 starve beside anything else that computes

import httpx
import pytest
from ports import free_ports

SETTINGS = {
    "dtype": "float32",
    "draft_width": "fixed",
    "max_num_seqs": 2,
    "max_queued_requests": 3,
    "seed": 7,
    "log_format": "json",
}
MODEL = "dflash2-embedded"


@pytest.fixture(scope="session")
def service():
    """url, http (httpx.Client), settings; `wait_for(condition)` polls /server_info until the condition holds.

    With DFLASH2_URL set it is the service that already runs there (tests/conformance/run).
    """
    if "DFLASH2_URL" in os.environ:
        yield from connected(os.environ["DFLASH2_URL"])
        return
    import ray
    from ray import serve

    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=4,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        namespace="tests",
    )
    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(ServiceConfig(**SETTINGS)), name="default")
    yield from connected(f"http://127.0.0.1:{port}")
    serve.delete("default")
    serve.shutdown()
    ray.shutdown()


def connected(url):
    """What the fixture `service` gives, for the service at `url`."""
    http = httpx.Client(base_url=url, timeout=120)

    def wait_for(condition, patience_s=60):
        deadline = time.monotonic() + patience_s
        while True:
            answer = http.get("/server_info")
            if answer.status_code == 200 and condition(answer.json()):
                return answer.json()
            assert time.monotonic() < deadline, f"still {answer.text}"

    yield SimpleNamespace(url=url, http=http, wait_for=wait_for, settings=SETTINGS)
    http.close()


@pytest.fixture
def idle(service):
    """The service with nothing running before and after the test."""
    calm = lambda info: info["num_requests_running"] == 0 and info["num_requests_in_flight"] == 0  # noqa: E731
    service.wait_for(calm)
    yield service
    info = service.wait_for(calm)
    assert info["num_free_pages"] == info["num_pages"]


@pytest.fixture(scope="session")
def engine():
    """The same engine in this process: what the service must answer."""
    from dflash2_ray import LLM

    engine = LLM(dtype="float32", draft_width="fixed", max_num_seqs=4, seed=7)
    yield engine
    engine.close()


@pytest.fixture
def run_async():
    """Runs a coroutine to its end on a fresh event loop."""
    return asyncio.run
