"""The Prometheus text: names, types, labels and buckets, as tools read them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash2_ray.core.books import Books
from dflash2_ray.core.ledger import Ledger
from dflash2_ray.core.measures import MEASURES
from dflash2_ray.serving.metrics import exposition

FACTS = {"model": "m", "num_speculative_tokens": 7, "most_tokens_per_step": 8, "max_model_len": 200, "sglang": False}
GAUGES = {
    "0": {
        "running": 2, "waiting": 5, "waiting_by_reason/capacity": 5, "kv_usage": 0.25, "rank_up/target/0": 1, "rank_up/target/1": 1,
        "rank_up/drafter/0": 0, "spec_active": 0, "num_steps": 7,
        "cache": {
            "block_size": 16, "num_gpu_blocks": 10, "cache_dtype": "auto", "gpu_memory_utilization": 0.9, "enable_prefix_caching": True,
        },
    }
}  # fmt: skip
VLLM = {
    "vllm:spec_decode_num_drafts": ("counter", set()),
    "vllm:spec_decode_num_draft_tokens": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", {"position"}),
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:prefix_cache_queries": ("counter", set()),
    "vllm:prefix_cache_hits": ("counter", set()),
    "vllm:num_preemptions": ("counter", set()),
    "vllm:prompt_tokens": ("counter", set()),
    "vllm:generation_tokens": ("counter", set()),
    "vllm:request_success": ("counter", {"finished_reason"}),
    "vllm:admission_rejections": ("counter", {"reason"}),
    "vllm:time_to_first_token_seconds": ("histogram", set()),
    "vllm:inter_token_latency_seconds": ("histogram", set()),
    "vllm:request_time_per_output_token_seconds": ("histogram", set()),
    "vllm:e2e_request_latency_seconds": ("histogram", set()),
    "vllm:request_queue_time_seconds": ("histogram", set()),
    "vllm:request_inference_time_seconds": ("histogram", set()),
    "vllm:request_prefill_time_seconds": ("histogram", set()),
    "vllm:request_decode_time_seconds": ("histogram", set()),
    "vllm:request_prompt_tokens": ("histogram", set()),
    "vllm:request_generation_tokens": ("histogram", set()),
    "vllm:iteration_tokens_total": ("histogram", set()),
    "vllm:request_params_n": ("histogram", set()),
    "vllm:request_params_max_tokens": ("histogram", set()),
}
OURS = {
    "dflash2:emitted_accepted_tokens": ("counter", set()),
    "dflash2:request_acceptance_length": ("histogram", set()),
    "dflash2:spec_skipped": ("counter", {"reason"}),
    "dflash2:spec_active": ("gauge", set()),
    "dflash2:draft_seconds": ("histogram", set()),
    "dflash2:verify_seconds": ("histogram", set()),
    "dflash2:transfer_seconds": ("histogram", set()),
    "dflash2:transfer_bytes": ("counter", set()),
    "dflash2:draft_wait_seconds": ("histogram", set()),
    "dflash2:output_token_latency_seconds": ("histogram", set()),
    "dflash2:rank_up": ("gauge", {"rank", "role"}),
    "dflash2:restarts": ("counter", {"role"}),
}
BUCKETS = {  # first bound, last bound before infinity
    "vllm:time_to_first_token_seconds": ("0.001", "2560.0"),
    "vllm:inter_token_latency_seconds": ("0.01", "80.0"),
    "vllm:e2e_request_latency_seconds": ("0.3", "7680.0"),
    "vllm:request_queue_time_seconds": ("0.3", "7680.0"),
    "vllm:request_prompt_tokens": ("1.0", "200.0"),
    "vllm:iteration_tokens_total": ("1.0", "16384.0"),
    "dflash2:request_acceptance_length": ("1.0", "8.0"),
}


def state(ledger=None, **facts):
    books = Books()
    books.take("x", "0", 1, (ledger or Ledger()).numbers, FACTS | facts)
    return books.state()


def families(text):
    return {one.name: one for one in text_string_to_metric_families(text.decode())}


def test_names_types_and_labels():
    found = families(exposition(state(), GAUGES))
    cache = found.pop("vllm:cache_config_info")
    assert cache.samples[0].labels == {
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "10",
        "cache_dtype": "auto",
        "gpu_memory_utilization": "0.9",
        "enable_prefix_caching": "True",
    }
    assert {name: one.type for name, one in found.items()} == {name: kind for name, (kind, _) in (VLLM | OURS).items()}
    for name, (_, labels) in (VLLM | OURS).items():
        assert found[name].samples, name
        for sample in found[name].samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine"} | labels
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")


def test_what_has_not_happened_is_told_at_0():
    found = families(exposition(state(), {}))
    told = {
        name: {
            tuple(value for label, value in sample.labels.items() if label not in ("model_name", "engine"))
            for sample in found[name].samples
        }
        for name in (
            "vllm:request_success",
            "vllm:admission_rejections",
            "dflash2:spec_skipped",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
        )
    }
    assert told["vllm:request_success"] == {("stop",), ("length",), ("abort",), ("error",)}
    assert told["vllm:admission_rejections"] == {("max_num_queued_reqs",), ("max_num_queued_tokens",)}
    assert told["dflash2:spec_skipped"] == {
        ("requested",),
        ("drafter_unavailable",),
        ("drafter_timeout",),
        ("context_too_long",),
        ("load",),
        ("warmup",),
    }
    assert told["vllm:spec_decode_num_accepted_tokens_per_pos"] == {(str(index),) for index in range(7)}
    assert "vllm:num_requests_running" not in {name for name, one in found.items() if one.samples}


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets(name):
    bounds = [
        sample.labels["le"]
        for sample in families(exposition(state(), {}))[name].samples
        if sample.name.endswith("_bucket")
    ]
    assert (bounds[0], bounds[-2], bounds[-1]) == (*BUCKETS[name], "+Inf")
    if name == "dflash2:request_acceptance_length":
        assert [float(bound) for bound in bounds[:-1]] == [1 + index / 2 for index in range(15)]


def test_a_histogram_is_summed_up():
    ledger = Ledger()
    for value in (1, 1.2, 4, 8, 300):
        ledger.observe("acceptance_length", value)
    samples = {
        (one.name.rsplit("_", 1)[1], one.labels.get("le")): one.value
        for one in families(exposition(state(ledger), {}))["dflash2:request_acceptance_length"].samples
    }
    assert [samples["bucket", le] for le in ("1.0", "1.5", "3.5", "4.0", "8.0", "+Inf")] == [1, 2, 2, 3, 4, 5]
    assert (samples["sum", None], samples["count", None]) == (pytest.approx(314.2), 5)


def test_what_vllm_bench_serve_reads():
    """It keeps lines that start with vllm:spec_decode and whose name ends in _total, and sums them over labels."""
    ledger = Ledger()
    for key, count in {
        "num_drafts": 3,
        "num_draft_tokens": 21,
        "num_accepted_tokens": 10,
        "accepted_per_position/3": 1,
    }.items():
        ledger.add(key, count)
    found = {}
    for line in exposition(state(ledger), GAUGES).decode().splitlines():
        name, _, rest = line.partition("{")
        if line.startswith("vllm:spec_decode") and name.endswith("_total"):
            found[name, rest.partition('position="')[2].partition('"')[0]] = float(line.split()[-1])
        assert "_created" not in line
    assert found["vllm:spec_decode_num_drafts_total", ""] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 21
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 10
    assert [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(index)] for index in range(7)] == [
        0,
        0,
        0,
        1,
        0,
        0,
        0,
    ]


def test_sglang_names_are_an_option():
    assert not any(name.startswith("sglang") for name in families(exposition(state(), GAUGES)))
    found = families(exposition(state(sglang=True), GAUGES))
    assert {name: one.type for name, one in found.items() if name.startswith("sglang")} == {
        "sglang:spec_accept_length": "gauge", "sglang:spec_accept_rate": "gauge", "sglang:spec_num_steps": "gauge",
        "sglang:spec_num_draft_tokens": "gauge", "sglang:spec_verify_calls": "counter",
    }  # fmt: skip


def test_names_are_used_once_and_legal_for_ray():
    assert len({one.key for one in MEASURES}) == len({one.ray_name for one in MEASURES}) == len(MEASURES)
    assert all(one.ray_name.isidentifier() for one in MEASURES)
