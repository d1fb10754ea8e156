"""Ray as an operator starts it (`ray start`, `serve deploy`), every node a process tree of its own that a drill can kill and start again.

Figures that a drill told with `tell` are printed at the end.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from ports import free_ports

ROOT = Path(__file__).parents[2]
FIGURES = pytest.StashKey[list]()
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "PYTHONPATH": os.pathsep.join(
        path for path in (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")) if path
    ),
}
LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0.8,
    "stream": True,
    "return_token_ids": True,
    "speculative": {"enabled": False},
}  # plain: it takes a while
SHORT = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}


def pytest_configure(config):
    config.stash[FIGURES] = []


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tell(pytestconfig):
    """Keeps one figure for the end of the run: tell("what", "how much")."""
    return lambda what, value: pytestconfig.stash[FIGURES].append(f"{what}: {value}")


def until(condition, says, patience_s=180):
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, says
        time.sleep(0.05)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_ready(url):
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def command(name):
    return str(Path(sys.executable).with_name(name))


class Tree:
    """A process in a session of its own, with all that it starts; ended by their ids."""

    def __init__(self, words, log, **environment):
        with open(log, "a") as file:
            self._process = subprocess.Popen(
                words, stdout=file, stderr=file, start_new_session=True, env={**ENVIRONMENT, **environment}
            )
        self._log = Path(log)

    def assert_runs(self):
        assert self._process.poll() is None, self._log.read_text()

    def kill(self):
        """SIGKILL to all at once: what a lost machine looks like."""
        for _ in range(2):  # the second look finds what was started during the first
            for pid in self._members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(30)

    def stop(self):
        """SIGTERM to the first, which ends its own; nothing stays."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self.kill()

    def _members(self):
        """Process ids of its session, which every process that Ray starts stays in."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError):
                if os.getsid(int(entry.name)) == self._process.pid:
                    yield int(entry.name)


class Cluster:
    """A head, and nodes that join it, on one machine. The head's ports stay the same over its lives; so does the folder."""

    def __init__(self, folder):
        self.folder = folder
        gcs, self.head_port, self.dashboard_port, self.node_port = free_ports(4)
        self.gcs = f"127.0.0.1:{gcs}"
        self.api = f"http://127.0.0.1:{self.dashboard_port}"
        self._trees = {}

    def start_head(self, num_cpus, *options, **environment):
        Path(f"{self.folder}/ray_current_cluster").unlink(missing_ok=True)  # a new machine knows of no Ray before it
        ports = f"--port={self.gcs.partition(':')[2]} --dashboard-port={self.dashboard_port} --dashboard-host=127.0.0.1"
        self._start(
            "head",
            ["--head", f"--temp-dir={self.folder}", *ports.split(), f"--num-cpus={num_cpus}", *options],
            environment,
        )
        until(lambda: self._is_up(), "the head does not start")

    def start_node(self, num_cpus, **environment):
        """A node whose Serve proxy has a port of its own, since all nodes are one machine."""
        environment["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(self.node_port)
        self._start("node", [f"--address={self.gcs}", f"--num-cpus={num_cpus}"], environment)

    def _start(self, name, options, environment):
        agent, metrics = free_ports(2)
        words = [
            command("ray"),
            "start",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--object-store-memory={100 * 2**20}",
        ]
        words += [f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}", *options]
        self._trees[name] = Tree(words, f"{self.folder}/{name}.log", **environment)

    def _is_up(self):
        self._trees["head"].assert_runs()
        return self.status() is not None

    def status(self):
        """What the dashboard knows of Serve; None while it does not answer."""
        try:
            answer = httpx.get(f"{self.api}/api/serve/applications/", timeout=10)
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def kill(self, name):
        self._trees.pop(name).kill()

    def stop(self, name):
        self._trees.pop(name).stop()

    def close(self):
        for name in ("node", "head"):
            if name in self._trees:
                self.stop(name)

    def apply(self, file):
        """`serve deploy FILE`; returns when the application runs with the replicas that it asks for."""
        words = [command("serve"), "deploy", str(file), "--address", self.api]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        until(self.runs, "the application does not run", 240)

    def runs(self):
        application = ((self.status() or {}).get("applications") or {}).get("default")
        if application is None:
            return False
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        return application["status"] == "RUNNING" and all(
            one["status"] == "HEALTHY" for one in application["deployments"].values()
        )

    def replicas(self):
        """(deployment, replica, actor, process id) of all that run: what a restart would change."""
        deployments = self.status()["applications"]["default"]["deployments"].values()
        return sorted(
            (one["name"], replica["replica_id"], replica["actor_id"], replica["pid"])
            for one in deployments
            for replica in one["replicas"]
            if replica["state"] == "RUNNING"
        )


@pytest.fixture(scope="module")
def cluster():
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    cluster = Cluster(folder)
    yield cluster
    cluster.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def file(cluster, tmp_path_factory):
    """deploy/serve/cpu-dev.yaml with a free port and small settings; everything else as in the file."""
    schema = yaml.safe_load((ROOT / "deploy/serve/cpu-dev.yaml").read_text())
    schema["http_options"]["port"] = cluster.head_port
    schema["applications"][0]["args"] |= {"max_num_seqs": 6, "max_queued_requests": 8, "num_kv_pages": 800}
    path = tmp_path_factory.mktemp("serve") / "cpu-dev.yaml"
    path.write_text(yaml.safe_dump(schema))
    return path


async def _stream(http, seed, on_first=None):
    """Token ids of one long answer, and the longest silence in seconds."""
    tokens, last, longest, done = [], None, 0.0, False
    async with http.stream("POST", "/v1/completions", json={**LONG, "seed": seed}) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            now = time.monotonic()
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                tokens += [token for choice in choices for token in choice.get("token_ids") or []]
                longest, last = max(longest, now - (last or now)), now
                if tokens and on_first is not None:
                    on_first.set()
            done = done or line == "data: [DONE]"
    assert done, f"the stream broke after {len(tokens)} tokens"
    return tokens, longest


@pytest.fixture(scope="session")
def clients():
    """streams(url, count, change): all answers and their longest silences, `change()` called in a thread once every stream has begun.
    ask(url): the text of a short answer."""

    def streams(url, count, change=lambda: None):
        async def together():
            async with httpx.AsyncClient(base_url=url, timeout=300) as http:
                begun = [asyncio.Event() for _ in range(count)]
                tasks = [asyncio.create_task(_stream(http, seed, event)) for seed, event in enumerate(begun)]
                await asyncio.gather(*(event.wait() for event in begun))
                await asyncio.to_thread(change)
                still = sum(not task.done() for task in tasks)
                results = await asyncio.gather(*tasks)
                return SimpleNamespace(
                    tokens=[tokens for tokens, _ in results],
                    silence_s=max(gap for _, gap in results),
                    num_running=still,
                )

        return asyncio.run(together())

    def ask(url):
        return (
            httpx.post(f"{url}/v1/completions", json=SHORT, timeout=120).raise_for_status().json()["choices"][0]["text"]
        )

    return SimpleNamespace(streams=streams, ask=ask)


@pytest.fixture(scope="session")
def parts():
    """What more a drill builds with."""
    return SimpleNamespace(root=ROOT, Tree=Tree, free_ports=free_ports, until=until, listens=listens, is_ready=is_ready)
