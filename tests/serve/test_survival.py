"""The kill matrix: every member of a unit, killed in every phase of a step, with eight streams on the way.

Every stream must finish with exactly the tokens of the undisturbed run. Phases are held still with SIGSTOP, not with waits: a
stopped drafter holds the step in `draft`, a stopped rank 1 holds rank 0 in a collective of `prefill` or `verify`.
"""

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from scrape import families, growth, numbers

SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "seed": 7,
    "tensor_parallel_size": 2,
    "drafter_placement": "separate",
    "draft_width": "fixed",
    "draft_deadline_ms": 4000,
    "step_timeout_s": 20,
    "num_kv_pages": 400,
}
PROMPTS = [
    "Once upon a time",
    "def add(a, b):\n",
    "import os",
    "The capital of France",
    "1 2 3 4 5",
    "SELECT * FROM",
    "A recipe for",
    "In the beginning",
]
SAMPLING = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}]
NUM_TOKENS = 40
LOSS_TIMES = Path(__file__).parents[2] / "deploy/loss_times.py"


@pytest.fixture(scope="module")
def unit(service):
    """A unit of two target ranks and a separate drafter, with its client and its own description."""
    from ray import serve

    from dflash2_ray import Client
    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    before = free_cpus()
    serve.run(app(ServiceConfig(**SETTINGS)), name="survival", route_prefix="/survival")
    client = Client("survival")

    def describe():
        try:
            return asyncio.run(client.describe())
        except Exception:  # no unit is ready
            return None

    def wait_for(condition, patience_s=120):
        deadline = time.monotonic() + patience_s
        while True:
            info = describe()
            if info is not None and condition(info):
                return info
            assert time.monotonic() < deadline, f"still {info}"

    def scrape():
        return service.http.get("/survival/metrics").raise_for_status().text

    yield SimpleNamespace(client=client, wait_for=wait_for, describe=describe, scrape=scrape)
    bookkeeper = bookkeeper_pid()
    serve.delete("survival")
    all_free(before)
    assert not _alive(bookkeeper)


def bookkeeper_pid():
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()["applications"]["survival"]["deployments"]["bookkeeper"]
    return next((replica["pid"] for replica in details["replicas"] if replica["state"] == "RUNNING"), None)


def free_cpus():
    import ray

    return ray.available_resources()["CPU"]


def all_free(before, patience_s=30):
    """Every bundle and actor is given back within the stated time."""
    deadline = time.monotonic() + patience_s
    while free_cpus() < before - 1e-6:
        assert time.monotonic() < deadline, f"{before - free_cpus()} CPUs are still taken"


@pytest.fixture(scope="module")
def expected(engine):
    """The undisturbed tokens of every stream, from one process."""
    return [
        engine.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING[index % 2])[0].token_ids
        for index, prompt in enumerate(PROMPTS)
    ]


def whole(info):
    """Nothing is missing and nothing is left over."""
    return (
        info["degraded"] == []
        and info["num_requests_running"] == 0
        and info["num_requests_in_flight"] == 0
        and info["num_free_pages"] == info["num_pages"]
    )


def pids(info):
    return {row["role"]: row["pid"] for row in info["workers"]}


async def run_streams(client, on_tokens):
    """All streams at once; `on_tokens(counts)` is awaited behind every chunk. Returns the generations."""
    counts = [0] * len(PROMPTS)

    async def one(index):
        stream = client.astream(PROMPTS[index], max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING[index % 2])
        async for chunk in stream:
            counts[index] += len(chunk.token_ids)
            await on_tokens(counts)
            last = chunk
        return last.generation

    return await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))


def disturb(unit, victim, phase):
    """Run the streams and kill the victim in the given phase; returns (generations, description before)."""
    before = unit.wait_for(whole)
    pid = pids(before)
    killed = asyncio.Event()

    async def kill():
        if killed.is_set():
            return
        killed.set()
        held = {"draft": pid["drafter"], "verify": pid["target rank 1"]}.get(phase)
        if held is not None:
            os.kill(held, signal.SIGSTOP)
        os.kill(pid[victim], signal.SIGKILL)
        if held is not None and held != pid[victim] and victim == "drafter":
            os.kill(held, signal.SIGCONT)

    async def on_tokens(counts):
        if phase != "prefill" and min(counts) > 1:
            await kill()

    async def scenario():
        if phase != "prefill":
            return await run_streams(unit.client, on_tokens)
        os.kill(pid["target rank 1"], signal.SIGSTOP)
        running = asyncio.ensure_future(run_streams(unit.client, on_tokens))
        while (await unit.client.describe())["num_requests_running"] == 0:
            pass
        os.kill(pid[victim], signal.SIGKILL)
        if victim == "drafter":
            os.kill(pid["target rank 1"], signal.SIGCONT)
        return await running

    return asyncio.run(scenario()), before


@pytest.mark.parametrize("phase", ["prefill", "draft", "verify", "emit"])
@pytest.mark.parametrize("victim", ["drafter", "target rank 1", "target rank 0", "unit"])
def test_streams_survive(unit, expected, victim, phase):
    counted = numbers(unit.scrape())
    generations, before = disturb(unit, victim, phase)
    assert [one.token_ids for one in generations] == expected
    resumed = [one.metrics["num_resumes"] for one in generations]
    assert (max(resumed) == 0) == (victim == "drafter")
    after = unit.wait_for(whole)
    gone, here = pids(before), pids(after)
    assert here[victim] != gone[victim]
    if victim == "drafter":
        assert after["num_drafter_restarts"] > before["num_drafter_restarts"]
        assert here["target rank 0"] == gone["target rank 0"]
    disturbed = numbers(unit.scrape())
    told = growth(counted, disturbed)  # nothing has gone back
    ended = told.get("vllm:request_success_total/length", 0)
    assert ended == len(PROMPTS) or (victim == "unit" and ended < len(PROMPTS))  # its last second may be lost with it
    assert (told.get(f"dflash2:restarts_total/{victim.split()[0]}", 0) > 0) == (victim != "unit")
    again = asyncio.run(run_streams(unit.client, _nothing))
    assert [one.token_ids for one in again] == expected
    told = growth(disturbed, numbers(unit.scrape()))
    assert told["vllm:generation_tokens_total"] == NUM_TOKENS * len(PROMPTS)
    assert told["dflash2:emitted_accepted_tokens_total"] == sum(
        one.metrics["speculative_decoding"]["emitted_accepted_tokens"] for one in again
    )
    assert sum(one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for one in again) > 0
    for role, pid in gone.items():
        assert pid == here[role] or not _alive(pid), f"{role} of the lost unit is still there"


async def _nothing(counts):
    return None


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_hung_drafter_is_replaced(unit, expected):
    """Stopped, not dead: steps go on without it after the deadline, it is found out and replaced, and speculation returns."""
    before = unit.wait_for(whole)
    os.kill(pids(before)["drafter"], signal.SIGSTOP)
    for _ in range(100):  # a fast machine is through with its texts before anybody can be sure
        generations = asyncio.run(run_streams(unit.client, _nothing))
        assert [one.token_ids for one in generations] == expected
        assert all(one.metrics["num_resumes"] == 0 for one in generations)
        if unit.describe()["num_drafter_restarts"] > before["num_drafter_restarts"]:
            break
    after = unit.wait_for(whole)
    assert pids(after)["drafter"] != pids(before)["drafter"]


def test_loss_times_are_measured(unit):
    """deploy/loss_times.py on this unit."""
    spec = importlib.util.spec_from_file_location("loss_times", LOSS_TIMES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    undisturbed_s, losses = asyncio.run(module.measure(unit.client, ("target rank 1", "no such worker"), NUM_TOKENS))
    assert len(undisturbed_s) == module.NUM_STREAMS
    (loss,) = losses
    assert loss.num_right == module.NUM_STREAMS
    assert 0 < loss.took_s < loss.whole_s
    assert min(loss.gaps_s) > 0


def test_a_hung_rank_is_replaced(unit, expected):
    before = unit.wait_for(whole)
    os.kill(pids(before)["target rank 1"], signal.SIGSTOP)
    generations = asyncio.run(run_streams(unit.client, _nothing))
    assert [one.token_ids for one in generations] == expected
    assert all(one.metrics["num_resumes"] == 1 for one in generations)
    after = unit.wait_for(whole)
    assert after["generation"] > before["generation"]
    assert not _alive(pids(before)["target rank 1"])


def test_metrics_go_on_without_a_unit_that_hangs(unit):
    pid = pids(unit.wait_for(whole))["unit"]
    counted = numbers(unit.scrape())
    os.kill(pid, signal.SIGSTOP)
    try:
        assert growth(counted, numbers(unit.scrape())) == {}
    finally:
        os.kill(pid, signal.SIGCONT)


def test_metrics_outlive_the_bookkeeper(unit, expected):
    unit.wait_for(whole)
    counted = numbers(unit.scrape())
    killed = bookkeeper_pid()
    os.kill(killed, signal.SIGKILL)
    generations = asyncio.run(run_streams(unit.client, _nothing))
    assert [one.token_ids for one in generations] == expected
    deadline = time.monotonic() + 60
    while bookkeeper_pid() in (killed, None) or not growth(counted, numbers(unit.scrape())):
        assert time.monotonic() < deadline
    told = growth(counted, numbers(unit.scrape()))
    assert told["vllm:generation_tokens_total"] == NUM_TOKENS * len(PROMPTS)
    assert told["vllm:request_success_total/length"] == len(PROMPTS)
    assert families(unit.scrape())["dflash2:spec_active"].samples[0].value == 1


def test_a_unit_that_cannot_start_leaves_nothing(service, tmp_path):
    from ray import serve

    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    before = free_cpus()
    settings = {**SETTINGS, "target": str(tmp_path), "drafter": "none"}
    with pytest.raises(RuntimeError):
        serve.run(app(ServiceConfig(**settings)), name="broken", route_prefix="/broken")
    serve.delete("broken")
    all_free(before)
