"""`/metrics` of a running service: what a client was told before it asks is in the numbers, exactly."""

import asyncio
import time

import httpx
import pytest
from scrape import families, growth, numbers

from dflash2_ray.core.measures import MEASURES


@pytest.fixture
def grown(idle):
    """`grown(work)`: what `work()` adds to the numbers."""

    def of(work):
        before = numbers(idle.http.get("/metrics").raise_for_status().text)
        work()
        return growth(before, numbers(idle.http.get("/metrics").raise_for_status().text))

    return of


def complete(service, **options):
    body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "temperature": 0, **options}
    answer = service.http.post("/v1/completions", json=body)
    return answer.raise_for_status().json()


def test_every_measure_is_there_once(idle):
    found = families(idle.http.get("/metrics").text)
    assert {one.name: one.kind for one in MEASURES} == {
        name: one.type for name, one in found.items() if name != "vllm:cache_config_info"
    }
    for one in MEASURES:
        for sample in found[one.name].samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine", *one.labels}
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("dflash2-embedded", "0")
    assert [
        (sample.labels["role"], sample.labels["rank"], sample.value) for sample in found["dflash2:rank_up"].samples
    ] == [("target", "0", 1)]
    assert found["dflash2:spec_active"].samples[0].value == 1
    assert found["vllm:num_requests_running"].samples[0].value == 0


def test_one_answer_in_the_numbers(idle, grown):
    answers = []
    told = grown(lambda: answers.append(complete(idle)))
    stats, usage = answers[0]["metrics"]["speculative_decoding"], answers[0]["usage"]
    assert told["vllm:prompt_tokens_total"] == told["vllm:request_prompt_tokens_sum"] == usage["prompt_tokens"]
    assert told["vllm:generation_tokens_total"] == told["vllm:request_generation_tokens_sum"] == 24
    assert told["vllm:request_success_total/length"] == 1
    assert told["vllm:spec_decode_num_drafts_total"] == stats["num_spec_steps"]
    assert told["vllm:spec_decode_num_draft_tokens_total"] == stats["num_draft_tokens"]
    assert told["dflash2:emitted_accepted_tokens_total"] == stats["emitted_accepted_tokens"] > 0
    assert told["vllm:spec_decode_num_accepted_tokens_total"] >= stats["emitted_accepted_tokens"]
    assert told["dflash2:request_acceptance_length_sum"] == pytest.approx(stats["mean_acceptance_length"])
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
        "request_time_per_output_token",
    ):
        assert told[f"vllm:{name}_seconds_count"] == 1, name
    assert told["vllm:inter_token_latency_seconds_count"] == stats["num_spec_steps"]
    assert told["dflash2:output_token_latency_seconds_count"] == 23
    assert (
        told["dflash2:verify_seconds_count"] == told["vllm:iteration_tokens_total_count"] == 1 + stats["num_spec_steps"]
    )
    assert told["dflash2:draft_seconds_count"] == stats["num_spec_steps"]
    assert told["vllm:request_params_max_tokens_sum"] == 24


def test_a_prompt_that_comes_again_is_found_again(idle, grown):
    answers = []
    told = grown(lambda: answers.extend(complete(idle, prompt=list(range(300, 340)), max_tokens=9) for _ in range(2)))
    cold, warm = answers
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers] == [0, 32]
    assert told["vllm:prefix_cache_queries_total"] == 80
    assert told["vllm:prefix_cache_hits_total"] == 32
    histograms = [one["metrics"]["speculative_decoding"]["acceptance_histogram"] for one in answers]
    assert histograms[0] == histograms[1]


def test_how_requests_end(idle, grown):
    text = complete(idle)["choices"][0]["text"]

    def work():
        stopped = complete(idle, stop=text[10:14])
        assert stopped["choices"][0]["finish_reason"] == "stop"
        stopped_tokens.append(stopped["usage"]["completion_tokens"])
        complete(idle, n=2, speculative={"enabled": False})
        asyncio.run(leave())

    async def leave():
        """Cancelled with its first token on the way."""
        async with httpx.AsyncClient(base_url=idle.url) as http:
            body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_lines())
        idle.wait_for(lambda info: info["num_requests_in_flight"] == 0)

    stopped_tokens = []
    told = grown(work)
    assert {key.rpartition("/")[2]: value for key, value in told.items() if key.startswith("vllm:request_success")} == {
        "stop": 1,
        "length": 2,
        "abort": 1,
    }
    assert told["vllm:request_params_n_count"] == 3
    assert told["vllm:request_params_n_sum"] == 1 + 2 + 1
    assert told["dflash2:spec_skipped_total/requested"] == 2 * 23
    assert told["vllm:request_generation_tokens_count"] == 4
    assert stopped_tokens[0] < 24


def test_refusals_are_counted_by_limit(idle, grown):
    async def flood():
        async with httpx.AsyncClient(base_url=idle.url, timeout=120) as http:
            body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(8)))
        refused.append(sum(answer.status_code == 429 for answer in answers))

    refused = []
    told = grown(lambda: asyncio.run(flood()))
    assert refused[0] > 0
    assert told["vllm:admission_rejections_total/max_num_queued_reqs"] == refused[0]
    assert told["vllm:request_success_total/length"] == 8 - refused[0]


def test_ray_exports_the_same_numbers(idle):
    """On Ray's own port, a few seconds later."""
    import ray

    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    complete(idle)
    wanted = idle.http.get("/metrics").text
    total = sum(sample.value for sample in families(wanted)["vllm:generation_tokens"].samples)

    def told():
        return families(httpx.get(url, timeout=30).raise_for_status().text)

    def generated(found):
        same = [one for name, one in found.items() if name.startswith("ray_dflash2_generation_tokens")]
        return sum(sample.value for one in same for sample in one.samples if sample.labels["application"] == "default")

    deadline = time.monotonic() + 60
    while generated(found := told()) != total:
        assert time.monotonic() < deadline, f"{generated(found)} instead of {total}"
    names = {name.removesuffix("_total") for name in found}
    assert {
        f"ray_{one.ray_name}".removesuffix("_total")
        for one in MEASURES
        if one.key in ("verify_s", "running", "num_drafts", "acceptance_length")
    } <= names
