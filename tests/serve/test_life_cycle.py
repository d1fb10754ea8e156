"""One service through its years: deployed from a file, applied again, changed in place, redeployed and scaled while streams run."""

import asyncio
import os
import signal
import time

import pytest
from scrape import families, growth, numbers

from dflash2_ray.serving.ingress import SESSION_HEADERS

SETTINGS = {
    "dtype": "float32",
    "draft_width": "fixed",
    "max_num_seqs": 4,
    "max_queued_requests": 8,
    "seed": 7,
    "num_kv_pages": 800,
    "routing": "session",
}
SCALING = {"max_replicas": 2, "target_queue_wait_s": 0.3, "upscale_delay_s": 0, "downscale_delay_s": 1}
LONG = {
    "max_tokens": 600,
    "ignore_eos": True,
    "temperature": 0.8,
    "num_speculative_tokens": 0,
}  # plain: it takes a while
PROMPTS = ["Once upon a time", "def add(a, b):\n", "The capital of France", "In the beginning"]
PATIENCE_S = 120


def deploy(num_replicas=1, user_config=None, **settings):
    """What `serve deploy` does with a configuration file; returns when the application runs as asked."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": "years",
        "route_prefix": "/years",
        "import_path": "dflash2_ray.app",
        "args": {**SETTINGS, **settings},
    }
    named = {"unit": {"num_replicas": num_replicas} if "autoscaling" not in settings else {}, "ingress": {}}
    if user_config is not None:
        named = {name: {**one, "user_config": user_config} for name, one in named.items()}
    application["deployments"] = [{"name": name, **one} for name, one in named.items() if one]
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    wanted = {"unit": {"RUNNING": num_replicas}, "ingress": {"RUNNING": 1}, "bookkeeper": {"RUNNING": 1}}

    def is_as_asked():
        status = serve.status().applications.get("years")
        if status is not None and status.status == "DEPLOY_FAILED":
            pytest.fail(status.message)
        return status is not None and status.status == "RUNNING" and replica_states(status) == wanted

    until(is_as_asked)


def replica_states(status):
    """How many replicas of each deployment are in which state."""
    return {
        name: {state: count for state, count in one.replica_states.items() if count}
        for name, one in status.deployments.items()
    }


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture(scope="module")
def years(service):
    """Deployed from a file, two units; one from the first test on."""
    from ray import serve

    from dflash2_ray import Client

    deploy(num_replicas=2)
    yield Client("years")
    serve.delete("years")


@pytest.fixture(scope="module")
def expected(engine):
    return [one.token_ids for one in (engine.generate(prompt, seed=3, **LONG)[0] for prompt in PROMPTS)]


def scrape(service):
    return numbers(service.http.get("/years/metrics").raise_for_status().text)


def unit_pid(client):
    return next(row["pid"] for row in asyncio.run(client.describe())["workers"] if row["role"] == "unit")


def worker_pids(client):
    return {row["pid"] for unit in asyncio.run(client.overview())["units"] for row in unit["workers"]}


def while_streaming(client, change):
    """All prompts' generations; `change()` runs in a thread once every one of them has its first tokens."""

    async def one(prompt, started):
        last = None
        async for chunk in client.astream(prompt, seed=3, **LONG):
            last = chunk
            started.set()
        return last.generation

    async def together():
        begun = [asyncio.Event() for _ in PROMPTS]
        tasks = [asyncio.create_task(one(prompt, event)) for prompt, event in zip(PROMPTS, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.to_thread(change)
        return await asyncio.gather(*tasks)

    return asyncio.run(together())


def all_is_told(service, counted):
    """A unit that went leaves nothing untold, and nothing is told twice. A front that gets no answer in time tells what it knows, a new one
    503."""
    told = {}

    def all_have_ended():
        answer = service.http.get("/years/metrics")
        if answer.status_code == 200:
            told.update(growth(counted, numbers(answer.text)))
        return told.get("vllm:request_success_total/length", 0) >= len(PROMPTS)

    until(all_have_ended)
    assert told["vllm:request_success_total/length"] == len(PROMPTS)
    assert told["vllm:generation_tokens_total"] == LONG["max_tokens"] * len(PROMPTS)


def test_a_session_stays_with_its_unit(years, service):
    """Over HTTP by any of its headers, and through `Client`; sessions together use both units."""
    used = set()
    for session in range(20):
        before = answered_by_unit(service)
        for header in SESSION_HEADERS:
            answer = service.http.post(
                "/years/v1/completions",
                json={"prompt": "x", "max_tokens": 1, "ignore_eos": True},
                headers={header: f"session-{session}"},
            )
            assert answer.status_code == 200
        years.generate("x", max_tokens=1, ignore_eos=True, session_id=f"session-{session}")
        told = {unit: count - before.get(unit, 0) for unit, count in answered_by_unit(service).items()}
        assert sorted(told.values()) == [0, len(SESSION_HEADERS) + 1], told
        used.add(max(told, key=told.get))
    assert len(used) == 2


def answered_by_unit(service):
    """How many requests each unit has answered in full."""
    family = families(service.http.get("/years/metrics").text)["vllm:request_success"]
    return {
        sample.labels["engine"]: sample.value for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["finished_reason"] == "length"
    }  # fmt: skip


def test_an_overview_shows_every_unit_even_one_that_hangs(years):
    """Both serve; then rank 0 of one and the process of the other are stopped, then only the other's."""
    both = asyncio.run(years.overview())
    assert (both["status"], both["why"], both["serve"]["units"]) == ("ready", None, {"RUNNING": 2})
    first, second = both["units"]
    assert (first["unit"], second["unit"]) == (0, 1)
    assert {unit["state"] for unit in both["units"]} == {"serving"}
    pids = [{worker["role"]: worker["pid"] for worker in unit["workers"]} for unit in both["units"]]
    assert len({pid for unit in pids for pid in unit.values()}) == 4
    rank, process = pids[0]["target rank 0"], pids[1]["unit"]
    try:
        os.kill(process, signal.SIGSTOP)
        os.kill(rank, signal.SIGSTOP)
        none = asyncio.run(years.overview(timeout_s=4.0))
        os.kill(rank, signal.SIGCONT)
        one = asyncio.run(years.overview(timeout_s=1.0))
    finally:
        os.kill(rank, signal.SIGCONT)
        os.kill(process, signal.SIGCONT)
    assert none["status"] == "not ready"
    assert [unit["why"] for unit in none["units"]] == ["target rank 0 has not answered for 2 s", "no answer within 4 s"]
    assert one["status"] == "degraded"
    assert [unit["state"] for unit in one["units"]] == ["serving", "not serving"]
    assert one["degraded"] == ["a unit: no answer within 1 s"]


def test_scaling_down_lets_streams_finish(years, service, expected):
    """Nothing but the unit that goes is touched."""
    pids, counted = worker_pids(years), scrape(service)
    generations = while_streaming(years, deploy)
    assert len(pids) == 4  # a unit and its rank, twice
    assert worker_pids(years) < pids
    assert [one.token_ids for one in generations] == expected
    assert [one.metrics["num_resumes"] for one in generations] == [0] * len(PROMPTS)
    all_is_told(service, counted)


def test_a_start_is_probed_and_told(years):
    probe = asyncio.run(years.describe())["startup_probe"]
    assert probe["num_tokens"] == 48
    assert probe["acceptance_length"] > 1.2
    assert asyncio.run(years.describe())["spec_counters"]["num_drafts"] == 0  # it leaves no trace


def test_the_same_file_again_restarts_nothing(years):
    pid = unit_pid(years)
    deploy()
    assert unit_pid(years) == pid


def test_tunables_change_in_place(years, service, expected):
    """Under load: nothing is cut, no process is replaced, and the new limits hold."""
    pid = unit_pid(years)
    tuned = {"max_queued_requests": 0, "strict_fields": True, "draft_deadline_ms": 1234.0}
    generations = while_streaming(years, lambda: deploy(user_config=tuned))
    assert [one.token_ids for one in generations] == expected
    assert unit_pid(years) == pid
    until(lambda: asyncio.run(years.describe())["config"]["draft_deadline_ms"] == 1234.0)
    body = {"prompt": "x", "max_tokens": 1, "no_such_field": 1}
    refused = service.http.post("/years/v1/completions", json=body)
    assert refused.status_code == 400
    assert "no_such_field" in refused.text

    def one_more():
        answer = service.http.post("/years/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 429
        assert "max_queued_requests = 4" in answer.text

    while_streaming(years, one_more)
    deploy(user_config={})
    assert unit_pid(years) == pid
    assert service.http.post("/years/v1/completions", json=body).status_code == 200


def test_what_changes_while_ranks_are_replaced_holds(years):
    deploy()
    rank = next(row["pid"] for row in asyncio.run(years.describe())["workers"] if row["role"] == "target rank 0")
    os.kill(rank, signal.SIGKILL)
    deploy(user_config={"draft_deadline_ms": 777.0})
    years.generate("x", max_tokens=4)  # waits for the new ranks
    info = asyncio.run(years.describe())
    assert info["generation"] == 1
    assert info["config"]["draft_deadline_ms"] == 777.0


def test_a_redeploy_lets_streams_finish(years, service, expected):
    """Another setting is another unit; what runs in the old one ends there, and later requests go to the new one."""
    pid, counted = unit_pid(years), scrape(service)
    generations = while_streaming(years, lambda: deploy(autoscaling=SCALING))
    assert [one.token_ids for one in generations] == expected
    assert [one.metrics["num_resumes"] for one in generations] == [0] * len(PROMPTS)
    assert unit_pid(years) != pid
    all_is_told(service, counted)
    assert years.generate("x", max_tokens=4, ignore_eos=True)[0].usage.completion_tokens == 4


def test_units_follow_the_load(years, expected):
    """Deployed by the test before: requests that wait bring a second unit, calm takes it away, and no answer notices."""
    from ray import serve

    def num_units():
        return serve.status().applications["years"].deployments["unit"].replica_states.get("RUNNING", 0)

    async def loaded():
        answered = []

        async def one(prompt, tokens):
            while True:  # the load lasts until it is answered, on a fast machine too
                answered.append((await years.agenerate(prompt, seed=3, **LONG))[0].token_ids == tokens)
                if grown.done():
                    return

        grown = asyncio.create_task(asyncio.to_thread(until, lambda: num_units() == 2))
        cases = list(zip(PROMPTS, expected, strict=True)) * 3  # two thirds of them wait
        await asyncio.gather(*(one(*case) for case in cases))
        await grown
        return answered

    assert num_units() == 1
    answered = asyncio.run(loaded())
    assert len(answered) >= len(PROMPTS) * 3
    assert all(answered)
    until(lambda: num_units() == 1)
