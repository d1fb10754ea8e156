"""`dflash2-ray status` of a real service, over HTTP and through Ray."""

import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from dflash2_ray import cli


@pytest.fixture
def run(capsys, monkeypatch):
    """The command in this process: returncode, stdout, stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["dflash2-ray", "status", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        wrote = capsys.readouterr()
        own = "".join(
            line for line in wrote.out.splitlines(keepends=True) if "(raylet)" not in line
        )  # Ray tells this process of dead workers
        return SimpleNamespace(returncode=ended.value.code, stdout=own, stderr=wrote.err)

    return call


@pytest.mark.parametrize("way", ["http", "ray"])
def test_a_ready_service_on_one_page(idle, run, way):
    assert (
        idle.http.post(
            "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
        ).status_code
        == 200
    )
    told = idle.http.get("/server_info").json()
    done = run(*(("--url", idle.url) if way == "http" else ("--address", "auto")))
    assert (done.returncode, done.stderr) == (0, "")
    first, serve_says, empty, unit, load, header, *workers = done.stdout.splitlines()
    assert first == f"dflash2-embedded at {idle.url if way == 'http' else 'auto'}: ready"
    assert (serve_says, empty) == ("Serve says: application running; units: 1 running", "")
    assert unit.startswith("unit 0 (")
    assert f"serving · generation {told['generation']} of its ranks" in unit
    assert load.startswith(f"  0 requests running, 0 waiting · KV 0% of {told['num_pages']} pages · acceptance length ")
    assert header.split() == ["role", "host", "GPU", "pid", "node"]
    assert [line.split()[-2] for line in workers] == [str(worker["pid"]) for worker in told["workers"]]
    assert (
        [line.split("  ")[1].strip() for line in workers]
        == [worker["role"] for worker in told["workers"]]
        == ["unit", "target rank 0"]
    )


def test_json(idle, run, tmp_path):
    done = run("--url", idle.url + "/", "--json", "-")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    (unit,) = report["units"]
    assert (report["status"], report["model"], unit["state"], unit["kv_usage"], unit["tokens_per_s"]) == (
        "ready",
        "dflash2-embedded",
        "serving",
        0,
        None,
    )
    done = run("--url", idle.url, "--json", str(tmp_path / "status.json"))
    assert json.loads((tmp_path / "status.json").read_text())["units"][0]["replica"] == unit["replica"]
    assert "unit 0" in done.stdout


def test_a_unit_that_does_not_serve_is_not_ready(idle, run):
    rank = next(
        worker["pid"] for worker in idle.http.get("/server_info").json()["workers"] if worker["role"] == "target rank 0"
    )
    os.kill(rank, signal.SIGSTOP)
    try:
        done = run("--url", idle.url)
    finally:
        os.kill(rank, signal.SIGCONT)
    assert done.returncode == 1
    first, _, _, unit, *workers = done.stdout.splitlines()
    assert first == f"{idle.url}: not ready (unit 0: target rank 0 has not answered for 2 s)"
    assert "not serving: target rank 0 has not answered for 2 s" in unit
    assert str(rank) in workers[-1]
    assert run("--url", idle.url).returncode == 0


@pytest.mark.parametrize(
    ("words", "returncode", "says"),
    [
        (("--url", "http://127.0.0.1:9"), 1, "not reachable: http://127.0.0.1:9: ConnectError"),
        (("--url", "SERVICE/v1"), 1, "answers, but no dflash2_ray service does (HTTP 404)"),
        (("--url", "127.0.0.1:8000"), 2, "--url: expected http://HOST:PORT"),
        (("--url", "http://127.0.0.1:port"), 2, "--url: expected http://HOST:PORT"),
        (("--address", "127.0.0.1:9"), 1, "not reachable: Ray at 127.0.0.1:9: "),
        (("--address", "somewhere"), 2, "--address: expected auto or HOST:PORT"),
        (("--address", "auto", "--app-name", "nobody"), 1, "not ready: no application 'nobody'"),
        (("--no-such-option",), 2, "No such option"),
    ],
)
def test_no_service_is_one_clear_line(idle, run, words, returncode, says):
    done = run(*(word.replace("SERVICE", idle.url) for word in words))
    assert done.returncode == returncode
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
