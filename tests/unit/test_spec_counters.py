"""vLLM's way of counting drafts, and its names in the Prometheus text."""

from dataclasses import asdict

from dflash2_ray.core.spec_counters import SpecCounters
from dflash2_ray.serving.metrics import exposition


def counted():
    counters = SpecCounters.of_width(7)
    for accepted in (7, 0, 3):
        counters.record(7, accepted)
    return counters


def test_the_vectors_of_three_steps():
    counters = counted()
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (3, 21, 10)
    assert counters.accepted_per_position == [2, 2, 2, 1, 1, 1, 1]
    before = asdict(counters)
    counters.record(0, 0)
    assert asdict(counters) == before


def test_the_text_has_the_names_that_tools_read():
    facts = {"model": "m", "spec_counters": asdict(counted()), "num_free_pages": 3, "num_pages": 4, "num_requests_running": 2, "num_requests_waiting": 5}
    lines = exposition(facts).decode().splitlines()
    for line in (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 21.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 10.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="3"} 1.0',
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
    ):
        assert line in lines, line
    assert not any("_created" in line for line in lines)


def test_the_loop_counts_before_the_cut(scripted):
    """The last block is cut by the limit; what was accepted counts all the same."""
    loop = scripted.make_loop(scripted.Drafter())
    scripted.run(loop, [scripted.spec("r", [1, 2, 3], max_tokens=6)])
    counters = loop.describe()["spec_counters"]
    assert counters["num_drafts"] == 2
    assert counters["num_accepted_tokens"] >= 4
    loop.forget_history()
    assert loop.describe()["spec_counters"]["num_drafts"] == 0
