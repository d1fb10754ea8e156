"""Cancellation, overload, the Python client, and the loss of a rank, on a real service."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

# Thousands of plain steps: it is not over before a test has done what it does meanwhile.
LONG = {
    "prompt": "Once upon a time",
    "temperature": 1.0,
    "max_tokens": 2000,
    "ignore_eos": True,
    "stream": True,
    "speculative": {"enabled": False},
}


class Stream:
    """An open event stream that is left when the test says so."""

    def __init__(self, service, **changes):
        self._http = httpx.Client(base_url=service.url, timeout=120)
        self._context = self._http.stream("POST", "/v1/completions", json={**LONG, **changes})
        self.response = self._context.__enter__()
        self.lines = self.response.iter_lines()

    def first(self):
        return next(line for line in self.lines if line)

    def leave(self):
        self._context.__exit__(None, None, None)
        self._http.close()


def test_a_client_that_leaves_frees_its_request(idle):
    stream = Stream(idle)
    assert stream.first().startswith("data: {")
    idle.wait_for(lambda info: info["num_requests_running"] == 1)
    before = _num_cancelled(idle)
    stream.leave()
    info = idle.wait_for(lambda info: info["num_requests_running"] == 0 and info["num_free_pages"] == info["num_pages"])
    assert info["num_requests_cancelled"] == before + 1


def asked(service, **changes):
    """A connection with a request on it that nobody reads yet: closing it is a client that leaves before its first byte."""
    body = json.dumps({**LONG, **changes}).encode()
    host = service.url.removeprefix("http://")
    name, port = host.split(":")
    connection = socket.create_connection((name, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_waits_for_a_whole_answer_and_leaves_frees_its_request(idle):
    """Running and queued: neither has got a byte of its answer."""
    before = _num_cancelled(idle)
    clients = [asked(idle, stream=False) for _ in range(idle.settings["max_num_seqs"] + 1)]
    idle.wait_for(lambda info: info["num_requests_running"] == len(clients) - 1 and info["num_requests_waiting"] == 1)
    for client in clients:
        client.close()
    info = idle.wait_for(
        lambda info: info["num_requests_in_flight"] == 0 and info["num_free_pages"] == info["num_pages"]
    )
    assert info["num_requests_cancelled"] == before + len(clients)


def test_a_client_that_leaves_the_queue_frees_its_place(idle):
    runners = [Stream(idle) for _ in range(idle.settings["max_num_seqs"])]
    for runner in runners:
        runner.first()
    before = _num_cancelled(idle)
    queued = asked(idle)
    idle.wait_for(lambda info: info["num_requests_waiting"] == 1)
    queued.close()  # before its first token: it has not even got headers
    info = idle.wait_for(lambda info: info["num_requests_waiting"] == 0)
    assert info["num_requests_running"] == len(runners)
    assert info["num_requests_cancelled"] == before + 1
    for runner in runners:
        runner.leave()


def _num_cancelled(service):
    return service.http.get("/server_info").json()["num_requests_cancelled"]


def test_a_full_queue_is_a_429(idle):
    runners = [Stream(idle) for _ in range(idle.settings["max_num_seqs"])]
    for runner in runners:
        runner.first()
    clients = [asked(idle) for _ in range(idle.settings["max_queued_requests"])]
    full = idle.wait_for(lambda info: info["num_requests_waiting"] == len(clients))
    for stream in (False, True):
        answer = idle.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": stream})
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"]
    after = idle.http.get("/server_info").json()
    calls = [next(row["num_calls"] for row in info["workers"] if row["role"] == "unit") for info in (full, after)]
    assert calls[1] == calls[0] + 1  # of the description: the front refused by itself
    for runner in runners:
        runner.leave()
    for client in clients:
        client.close()


def test_client_answers_like_the_engine(idle, engine, run_async):
    from dflash2_ray import Client
    from dflash2_ray.errors import InvalidRequest

    client = Client()
    prompts = ["def add(a, b):\n", "Once upon a time"]
    expected = engine.generate(prompts, temperature=0, max_tokens=24)
    got = client.generate(prompts, temperature=0, max_tokens=24)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert [one.text for one in got] == [one.text for one in expected]
    assert (
        got[1].metrics["speculative_decoding"]["acceptance_histogram"]
        == (expected[1].metrics["speculative_decoding"]["acceptance_histogram"])
    )
    chat = [{"role": "user", "content": 'Spell the word "cake".'}]
    (reference,) = engine.chat(chat, temperature=0.8, seed=3, max_tokens=30)
    (answer,) = client.generate(messages=chat, temperature=0.8, seed=3, max_tokens=30)
    assert answer.token_ids == reference.token_ids
    pieces = list(client.stream(messages=chat, temperature=0.8, seed=3, max_tokens=30))
    assert "".join(piece.text for piece in pieces) == reference.text
    assert pieces[-1].generation.token_ids == reference.token_ids
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate("x", temperature=-1)
    with pytest.raises(InvalidRequest, match="9999"):
        client.generate(prompt_token_ids=[9999])
    with pytest.raises(InvalidRequest, match="unknown sampling option 'temprature'"):
        client.generate("x", temprature=1)

    async def asynchronous():
        both = await client.agenerate(prompts, temperature=0, max_tokens=24)
        streamed = [chunk async for chunk in client.astream(prompts[0], temperature=0, max_tokens=24)]
        return both, streamed

    both, streamed = run_async(asynchronous())
    assert [one.token_ids for one in both] == [one.token_ids for one in expected]
    assert streamed[-1].generation.token_ids == expected[0].token_ids


def test_the_ingress_takes_deltas_by_its_line_and_a_client_by_the_stream(idle):
    from dflash2_ray import Client

    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
    before = idle.http.get("/server_info").json()["num_requests_by_line"]
    by_line = [idle.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)]
    assert idle.http.get("/server_info").json()["num_requests_by_line"] == before + 2
    assert [Client().generate(body["prompt"], temperature=0, max_tokens=24)[0].text] * 2 == by_line
    assert idle.http.get("/server_info").json()["num_requests_by_line"] == before + 2


def test_the_readme_s_snippets_run(idle, engine, capsys, monkeypatch):
    """The first on an engine that is loaded already."""
    import dflash2_ray

    monkeypatch.setattr(dflash2_ray, "LLM", lambda target: engine)
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    in_process, service = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(in_process, "README.md", "exec"), names := {})
    assert (
        capsys.readouterr().out
        == f"{names['g'].text} {names['g'].metrics['speculative_decoding']['acceptance_histogram']}\n"
    )
    exec(compile(service, "README.md", "exec"), {})
    assert capsys.readouterr().out == engine.generate("def add(a, b):", temperature=0, max_tokens=40)[0].text


def test_closing_a_client_stream_cancels(idle):
    from dflash2_ray import Client

    stream = Client().stream("Once upon a time", max_tokens=2000, ignore_eos=True)
    next(stream)
    idle.wait_for(lambda info: info["num_requests_running"] == 1)
    stream.close()
    idle.wait_for(lambda info: info["num_requests_running"] == 0)


def pid_of(info):
    return next(row["pid"] for row in info["workers"] if row["role"] == "target rank 0")


def test_a_killed_rank_is_replaced_and_its_stream_goes_on(idle):
    body = {"max_tokens": 400, "speculative": None, "temperature": 0, "return_token_ids": True}
    undisturbed = idle.http.post("/v1/completions", json={**LONG, **body, "stream": False}).json()["choices"][0]
    before = idle.http.get("/server_info").json()
    stream = Stream(idle, **body)
    events = [stream.first()]
    os.kill(pid_of(before), signal.SIGKILL)
    events += [line for line in stream.lines if line]
    stream.leave()
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in events[:-1]]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == undisturbed["token_ids"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == undisturbed["text"]
    after = idle.wait_for(lambda info: pid_of(info) != pid_of(before), patience_s=120)
    assert after["num_rebuilds"] == before["num_rebuilds"] + 1


def test_health_answers_under_a_burst(idle):
    """Two hundred requests at once on two slots: nobody is restarted, and each gets an answer or a clean 429."""
    import concurrent.futures

    before = idle.http.get("/server_info").json()

    def ask(index):
        with httpx.Client(base_url=idle.url, timeout=120) as http:
            if index % 20 == 0:
                assert http.get("/health").status_code == 200
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "temperature": 0})
            return answer.status_code, "error" in answer.json()

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        outcomes = set(pool.map(ask, range(200)))
    assert (200, False) in outcomes
    assert outcomes <= {(200, False), (429, True)}
    after = idle.http.get("/server_info").json()
    assert [row["pid"] for row in after["workers"]] == [row["pid"] for row in before["workers"]]


def test_ready_says_what_is_missing(idle):
    answer = idle.http.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "degraded": []})


def test_a_killed_ingress_breaks_its_own_connections_only(idle, engine):
    from pathlib import Path

    from dflash2_ray import Client

    def parent(pid):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def ingress_pids():
        """Of this test's own Ray: its raylet is the parent of every worker, and this process the raylet's."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if (
                    path.read_bytes().startswith(b"ray::ServeReplica:default:ingress")
                    and parent(parent(path.parent.name)) == os.getpid()
                ):
                    found.append(int(path.parent.name))
            except OSError:  # it ended meanwhile
                continue
        return found

    (expected,) = engine.generate("Once upon a time", temperature=0, max_tokens=600, ignore_eos=True)
    before = ingress_pids()
    assert len(before) == 1
    other = Client().stream("Once upon a time", temperature=0, max_tokens=600, ignore_eos=True)
    chunks = [next(other)]
    stream = Stream(idle)
    stream.first()
    os.kill(before[0], signal.SIGKILL)
    try:
        rest = [line for line in stream.lines if line]
    except httpx.HTTPError:  # the connection broke
        rest = []
    stream.leave()
    assert "data: [DONE]" not in rest
    chunks += list(other)
    assert chunks[-1].generation.token_ids == expected.token_ids
    assert chunks[-1].generation.metrics["num_resumes"] == 0
    idle.wait_for(lambda info: ingress_pids() not in ([], before), patience_s=60)
