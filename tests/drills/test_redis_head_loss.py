"""Ray's state in Redis, as in the overlay `ha`: the head is lost while requests go on through the proxy of the node that has the replicas.

Redis is started by the manifest's own command. Without a `redis-server` (Debian: apt-get install redis-server) the drill is skipped.
"""

import os
import shutil
import signal
import threading
import time

import httpx
import pytest
import yaml

PASSWORD = "secret-of-redis"
NUM_STREAMS = 4
ENVIRONMENT = {"RAY_external_storage_namespace": "drill"}
WORKER_WAITS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # what KubeRay sets beside gcsFaultToleranceOptions


@pytest.fixture(scope="module")
def redis_address(parts, cluster):
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    documents = yaml.safe_load_all((parts.root / "k8s/overlays/ha/redis.yaml").read_text())
    (container,) = next(one for one in documents if one["kind"] == "StatefulSet")["spec"]["template"]["spec"][
        "containers"
    ]
    (port,) = parts.free_ports(1)
    *shell, script = container["command"]
    assert "dir /data" in script
    script = script.replace("dir /data", f"dir {cluster.folder}\\nbind 127.0.0.1\\nport {port}")
    redis = parts.Tree([*shell, script], f"{cluster.folder}/redis.log", REDISCLI_AUTH=PASSWORD)
    parts.until(lambda: parts.listens(port), "Redis does not start")
    yield f"127.0.0.1:{port}"
    redis.kill()


@pytest.fixture(scope="module")
def start_head(cluster, redis_address):
    """A head that computes nothing and has no replica, as in k8s/base."""
    return lambda: cluster.start_head(0, f"--redis-password={PASSWORD}", RAY_REDIS_ADDRESS=redis_address, **ENVIRONMENT)


@pytest.fixture(scope="module")
def service(cluster, file, start_head, parts):
    """The url of the node's proxy."""
    start_head()
    cluster.start_node(4, **WORKER_WAITS)
    cluster.apply(file)
    url = f"http://127.0.0.1:{cluster.node_port}"
    parts.until(lambda: parts.is_ready(url), "the node's proxy does not answer")
    return url


class Asking:
    """Short requests one after the other, until told to stop: when each was answered, how long it took, and what failed."""

    def __init__(self, ask, url):
        self.answered, self.failed = [], []
        self._ask, self._url, self._over = ask, url, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                text = self._ask(self._url)
                self.answered.append((time.monotonic(), time.monotonic() - begun, text))
            except httpx.HTTPError as error:
                self.failed.append((begun, repr(error)))

    def stop(self):
        self._over.set()
        self._thread.join()


def test_the_head_is_lost_while_requests_go_on(cluster, service, file, start_head, clients, parts, tell):
    expected = clients.streams(service, NUM_STREAMS)
    answer = clients.ask(service)
    before = cluster.replicas()
    asking = Asking(clients.ask, service)
    parts.until(lambda: asking.answered, "nothing is answered")
    lost_at = time.monotonic()

    during = clients.streams(service, NUM_STREAMS, lambda: cluster.kill("head"))
    assert during.num_running > 0, "every stream had ended before the head was gone"
    assert during.tokens == expected.tokens
    assert cluster.status() is None
    answered = len(asking.answered)
    parts.until(
        lambda: len(asking.answered) >= answered + 20 or asking.failed, "new requests are not answered without a head"
    )
    without_head_s = time.monotonic() - lost_at

    started = time.monotonic()
    start_head()
    up = time.monotonic()
    parts.until(lambda: cluster.runs() and cluster.replicas() == before, "the new head does not know the old replicas")
    known = time.monotonic()
    asking.stop()
    assert asking.failed == []
    assert {text for _, _, text in asking.answered} == {answer}
    after = [took for at, took, _ in asking.answered if at > lost_at]
    tell(
        "head lost, state in Redis: without a head",
        f"{without_head_s:.1f} s; longest silence of {NUM_STREAMS} streams {during.silence_s:.2f} s (undisturbed {expected.silence_s:.2f} s)",
    )
    tell("new requests meanwhile", f"{len(after)} of {len(after)} answered, longest {max(after):.2f} s")
    tell("new head on the old state", f"up after {up - started:.1f} s, replicas known {known - up:.1f} s later")

    cluster.apply(file)
    assert cluster.replicas() == before
    assert clients.streams(service, NUM_STREAMS).tokens == expected.tokens


def test_the_new_head_replaces_what_dies(cluster, service, clients, parts):
    """It is in charge again: a unit that is killed comes back."""
    before = cluster.replicas()
    (unit,) = [row for row in before if row[0] == "unit"]
    os.kill(unit[3], signal.SIGKILL)
    parts.until(lambda: [row for row in cluster.replicas() if row[0] == "unit" and row[2] != unit[2]], "no new unit")
    assert clients.ask(service)
    assert [row for row in cluster.replicas() if row[0] == "ingress"] == [row for row in before if row[0] == "ingress"]
