"""The Serve configurations of deploy/serve, really deployed one after the other on one local Ray: as KubeRay would, from the file, in
place. Every unit that they describe stands, and all of them give the same answer.

Ray is started by the command that the manifests' rayStartParams make. `localised` is the only place where a configuration is changed.
"""

import os
import re
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
from cluster_rules import groups, one, probe_urls, ray_container
from ports import free_ports
from rendering import ROOT, rendered

QUESTION = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
FILES = ("single-node", "multi-node", "cpu-dev")
SHAPES = {
    "cpu-dev": (1, 1, 1, "colocated"),
    "single-node": (1, 1, 2, "separate"),
    "multi-node": (2, 4, 2, "separate"),
}  # units, ingresses, ranks


def localised(schema, keys_file):
    """What a machine without GPUs, without the checkpoints and with one node forces; everything else stays as it is in the file."""
    (application,) = schema["applications"]
    args = application["args"]
    args["device"] = "cpu"
    for name in ("target", "drafter", "max_model_len"):  # the embedded pair, and its context
        args.pop(name, None)
    if "api_keys_file" in args:
        args["api_keys_file"] = str(keys_file)
    for deployment in application.get("deployments", []):
        del deployment["max_replicas_per_node"]
    return schema


@pytest.fixture(scope="module")
def cluster():
    """One Ray node with the labels of every group; `ports` by the manifests' names."""
    import ray
    from ray import serve

    ports = dict(zip(("gcs", "serve", "metrics", "agent"), free_ports(4), strict=True))
    cluster_groups = groups(one(rendered("multi-node"), "RayService"))
    options = {key: value for group in cluster_groups.values() for key, value in group["rayStartParams"].items()}
    options |= {
        "num-cpus": "8",
        "metrics-export-port": ports["metrics"],
        "dashboard-agent-listen-port": ports["agent"],
        "port": ports["gcs"],
    }
    options |= {"include-dashboard": "false", "object-store-memory": 100 * 2**20, "node-ip-address": "127.0.0.1"}
    labels = {key: value for group in cluster_groups.values() for key, value in group.get("labels", {}).items()}
    options["labels"] = ",".join(f"{key}={value}" for key, value in labels.items())
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={folder}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            path for path in (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")) if path
        ),
    }
    with open(f"{folder}/start.log", "w") as log:
        started = subprocess.Popen(
            [*command, *(f"--{key}={value}" for key, value in options.items())],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    try:
        _until(lambda: _listens(ports["gcs"]) or started.poll() is not None, "Ray does not start")
        assert started.poll() is None, Path(f"{folder}/start.log").read_text()
        ray.init(address=f"127.0.0.1:{ports['gcs']}", namespace="manifests", log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": ports["serve"]})
        yield SimpleNamespace(ports=ports, url=f"http://127.0.0.1:{ports['serve']}")
        serve.shutdown()
        ray.shutdown()
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(condition, says, patience_s=120):
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, says
        time.sleep(0.05)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """As the component `api-keys` mounts them: a file of clients' keys."""
    file = tmp_path_factory.mktemp("api-keys") / "keys"
    file.write_text("# clients\nkey-of-a-client\n")
    return file


def deploy(name, keys_file, **changed):
    """Hand the file to Serve as `serve deploy` and KubeRay do, and wait until it runs or failed: arguments, status and message."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    schema = localised(yaml.safe_load((ROOT / "deploy/serve" / f"{name}.yaml").read_text()), keys_file)
    args = schema["applications"][0]["args"]
    args |= changed
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(schema))
    state = {}

    def is_decided():
        (state["app"],) = (one.app_status for one in client.list_serve_statuses())
        return state["app"].status in ("RUNNING", "DEPLOY_FAILED")

    _until(is_decided, f"{name} is neither running nor failed", 240)
    return args, state["app"].status, state["app"].message


def running_replicas():
    """Replica ids by deployment."""
    from ray import serve

    details = serve.context._get_global_client().get_serve_details()["applications"]["default"]["deployments"]
    return {
        name: sorted(one["replica_id"] for one in each["replicas"] if one["state"] == "RUNNING")
        for name, each in details.items()
    }


@pytest.fixture(scope="module")
def answers():
    return {}


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_is_deployed_and_answers(name, cluster, keys, answers):
    args, status, message = deploy(name, keys)
    assert status == "RUNNING", message
    units, ingresses, ranks, placement = SHAPES[name]
    assert {kind: len(ids) for kind, ids in running_replicas().items()} == {
        "unit": units,
        "ingress": ingresses,
        "bookkeeper": 1,
    }
    key = {"Authorization": "Bearer key-of-a-client"} if "api_keys_file" in args else {}
    with httpx.Client(base_url=cluster.url, timeout=120, headers=key) as http:
        body = http.post("/v1/completions", json=QUESTION).raise_for_status().json()
        answers[name] = body["choices"][0]["text"]
        assert body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        assert http.get("/ready").json()["status"] == "ready"
        info = http.get("/server_info").json()
        exported = http.get("/metrics").raise_for_status().text
    roles = [
        "unit",
        *(f"target rank {rank}" for rank in range(ranks)),
        *(["drafter"] if placement == "separate" else []),
    ]
    assert [row["role"] for row in info["workers"]] == roles
    asked = {name: value for name, value in args.items() if name in info["config"]}
    assert {name: info["config"][name] for name in asked} == asked
    assert httpx.get(f"{cluster.url}/metrics").status_code == (401 if key else 200)
    assert len(set(answers.values())) == 1
    watched = re.findall(r"vllm:[a-z_]+", (ROOT / "k8s/README.md").read_text())
    assert watched
    assert [name for name in watched if f"\n{name}" not in exported] == []


def test_the_same_file_again_restarts_nothing(cluster, keys):
    before = running_replicas()
    assert deploy(FILES[-1], keys)[1] == "RUNNING"
    assert running_replicas() == before


def test_a_mistake_is_refused_and_what_runs_goes_on(cluster, keys, answers):
    unit = httpx.get(f"{cluster.url}/server_info").json()["workers"]
    _, status, message = deploy(FILES[-1], keys, max_num_seq=9)
    assert status == "DEPLOY_FAILED"
    assert "did you mean 'max_num_seqs'" in message
    assert _answer(cluster) == answers[FILES[-1]]
    assert [row["pid"] for row in httpx.get(f"{cluster.url}/server_info").json()["workers"]] == [
        row["pid"] for row in unit
    ]


def test_the_file_alone_brings_the_service_back(cluster, keys, answers):
    """Serve is gone with all it knew, as after a lost head without Redis."""
    from ray import serve

    serve.shutdown()
    serve.start(http_options={"host": "127.0.0.1", "port": cluster.ports["serve"]})
    assert deploy(FILES[-1], keys)[1] == "RUNNING"
    assert _answer(cluster) == answers[FILES[-1]]


def _answer(cluster):
    body = httpx.post(f"{cluster.url}/v1/completions", json=QUESTION, timeout=120).raise_for_status().json()
    return body["choices"][0]["text"]


@pytest.mark.parametrize("group", ["head", "targets"])
def test_probes_are_answered(group, cluster):
    """Everything that a pod's probes ask says yes while the service runs."""
    container = ray_container(groups(one(rendered("multi-node"), "RayService"))[group])
    here = {"52365": cluster.ports["agent"], "8000": cluster.ports["serve"]}
    asked = {url for kind in ("readinessProbe", "livenessProbe") for url in probe_urls(container[kind])}
    assert len(asked) == {"head": 1, "targets": 2}[group]
    for url in asked:
        port, slash, path = url.removeprefix("localhost:").partition("/")
        answer = httpx.get(f"http://127.0.0.1:{here[port]}{slash}{path}", timeout=30)
        assert answer.status_code == 200
        assert "success" in answer.text


def test_ray_exports_metrics_where_the_pod_monitor_looks(cluster):
    monitor = one(rendered("multi-node"), "PodMonitor")
    (path,) = [endpoint["path"] for endpoint in monitor["spec"]["podMetricsEndpoints"] if endpoint["port"] == "metrics"]
    answer = httpx.get(f"http://127.0.0.1:{cluster.ports['metrics']}{path}", timeout=30)
    assert answer.status_code == 200
    assert "ray_" in answer.text
