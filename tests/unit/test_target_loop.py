"""The serial loop on scripted models: stops, limits, counters, preemption, aborts (cases B01-B03, B12, B25-B28, B36, B38-B40)."""

import itertools

import pytest

from dflash2_ray.errors import ContextLengthExceeded, InvalidRequest, Overloaded

PATTERN_NAMES = ["ALL", "NONE", "P1", "P2", "MIX"]


@pytest.mark.parametrize("pattern", PATTERN_NAMES)
@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_speculation_changes_no_token(scripted, pattern, concurrency):
    drafter = scripted.Drafter(scripted.PATTERNS[pattern])
    loop = scripted.make_loop(drafter, max_num_seqs=concurrency)
    specs = [scripted.spec(f"r{i}", range(i + 1), max_tokens=20 + i) for i in range(12)]
    results = scripted.run(loop, specs)
    for i in range(12):
        tokens, last = results[f"r{i}"]
        assert tokens == scripted.continuation(range(i + 1), 20 + i)
        assert last.finish_reason == "length"
        stats = last.stats
        assert (stats["num_accepted_draft_tokens"] > 0) == (pattern != "NONE")
        # B12: tokens of all steps + the prefill token = completion tokens
        assert stats["num_spec_steps"] + stats["num_plain_steps"] + stats["num_accepted_draft_tokens"] + 1 == len(
            tokens
        )
    assert loop.pool.num_free == loop.pool.num_pages
    assert drafter.contexts == {}


@pytest.mark.parametrize("lead", [0, 1, 2, 3])
def test_b01_end_of_text_in_any_slot_of_a_block(scripted, lead):
    prompt = [5, 6, 7]
    reference = scripted.continuation(prompt, 12)
    eos = reference[5]
    assert eos not in reference[:5]
    spoiled = set(range(3, 3 + lead))  # `lead` single-token steps shift the alignment of the blocks behind them
    drafter = scripted.Drafter(lambda request_id, base_len, slot: base_len in spoiled and slot == 0)
    loop = scripted.make_loop(drafter, eos=[eos])
    tokens, last = scripted.run(loop, [scripted.spec("a", prompt, max_tokens=12)])["a"]
    assert tokens == reference[:6]
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert last.stats["num_accepted_draft_tokens"] > 0
    loop = scripted.make_loop(scripted.Drafter(), eos=[eos])
    tokens, last = scripted.run(loop, [scripted.spec("a", prompt, max_tokens=12, ignore_eos=True)])["a"]
    assert tokens == reference
    assert last.finish_reason == "length"


@pytest.mark.parametrize(("place", "finish"), [(2, "stop"), (4, "stop"), (5, "length")])
def test_b02_whichever_comes_first_in_token_order(scripted, place, finish):
    prompt = [9, 8]
    reference = scripted.continuation(prompt, 12)
    stop = reference[place]
    assert stop not in reference[:place]
    loop = scripted.make_loop(scripted.Drafter(), num_speculative_tokens=7)
    tokens, last = scripted.run(loop, [scripted.spec("a", prompt, max_tokens=5, stop_token_ids=(stop,))])["a"]
    assert last.finish_reason == finish
    assert tokens == reference[: min(place + 1, 5)]
    assert last.stop_reason == (stop if finish == "stop" else None)


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_b03_budget_is_what_is_delivered(scripted, max_tokens):
    loop = scripted.make_loop(scripted.Drafter())
    tokens, last = scripted.run(loop, [scripted.spec("a", [1], max_tokens=max_tokens)])["a"]
    assert len(tokens) == max_tokens
    assert last.finish_reason == "length"
    stats = last.stats
    assert stats["num_spec_steps"] + stats["num_accepted_draft_tokens"] + stats["num_plain_steps"] + 1 == max_tokens


def test_b12_a_cut_step_counts_what_it_delivered(scripted):
    prompt = [3]
    reference = scripted.continuation(prompt, 9)
    eos = reference[3]  # the first block brings reference[1:], eos is its third token
    assert eos not in reference[:3]
    loop = scripted.make_loop(scripted.Drafter(), num_speculative_tokens=7, eos=[eos])
    tokens, last = scripted.run(loop, [scripted.spec("a", prompt, max_tokens=30)])["a"]
    assert tokens == reference[:4]
    assert last.stats["acceptance_histogram"] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert last.stats["mean_acceptance_length"] == 3


@pytest.mark.parametrize("prompt_len", range(55, 65))
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_b25_context_limit(scripted, prompt_len, max_tokens):
    loop = scripted.make_loop(scripted.Drafter())
    neighbour = scripted.spec("n", [1, 2], max_tokens=8)
    prompt = [p % 250 for p in range(prompt_len)]
    if prompt_len == 64:
        with pytest.raises(ContextLengthExceeded, match=r"64 tokens"):
            loop.add(scripted.spec("a", prompt, max_tokens=max_tokens))
        results = scripted.run(loop, [neighbour])
    else:
        results = scripted.run(loop, [scripted.spec("a", prompt, max_tokens=max_tokens), neighbour])
        tokens, last = results["a"]
        assert tokens == scripted.continuation(prompt, max_tokens or 64 - prompt_len)
        assert last.finish_reason == "length"
    assert results["n"][0] == scripted.continuation([1, 2], 8)


def test_b40_prompt_plus_max_tokens_is_refused_with_both_counts(scripted):
    loop = scripted.make_loop(scripted.Drafter())
    for asked in (100, 10**12):
        with pytest.raises(ContextLengthExceeded) as caught:
            loop.add(scripted.spec("a", range(55), max_tokens=asked))
        assert "55" in str(caught.value)
        assert str(asked) in str(caught.value)
        assert "64" in str(caught.value)
    assert not loop.has_work


def test_b26_beyond_the_drafters_range_decoding_goes_on_plainly(scripted):
    drafter = scripted.Drafter()
    loop = scripted.make_loop(drafter, drafter_max_model_len=32)
    tokens, last = scripted.run(loop, [scripted.spec("a", range(20), max_tokens=30)])["a"]
    assert tokens == scripted.continuation(range(20), 30)
    assert last.stats["num_accepted_draft_tokens"] > 0
    assert last.stats["num_plain_steps"] > 0
    assert last.stats["skipped_reason"] == "context_too_long"
    assert drafter.contexts == {}


def test_chunked_prefill_beside_decoding(scripted):
    loop = scripted.make_loop(scripted.Drafter(), max_num_seqs=2, max_num_batched_tokens=8)
    long, short = [p % 250 for p in range(40)], [4]
    results = scripted.run(loop, [scripted.spec("s", short, max_tokens=20), scripted.spec("l", long, max_tokens=10)])
    assert results["s"][0] == scripted.continuation(short, 20)
    assert results["l"][0] == scripted.continuation(long, 10)
    assert results["l"][1].stats["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("pattern", PATTERN_NAMES)
def test_preemption_changes_no_token_and_leaks_no_page(scripted, pattern):
    drafter = scripted.Drafter(scripted.PATTERNS[pattern])
    loop = scripted.make_loop(drafter, max_num_seqs=6, num_kv_pages=18)
    specs = [scripted.spec(f"r{i}", [i, i + 1, i + 2], max_tokens=40) for i in range(6)]
    results = scripted.run(loop, specs)
    assert loop.scheduler.num_preemptions > 0
    for i in range(6):
        assert results[f"r{i}"][0] == scripted.continuation([i, i + 1, i + 2], 40)
        assert (results[f"r{i}"][1].stats["num_accepted_draft_tokens"] > 0) == (pattern != "NONE")
    assert loop.pool.num_free == 18
    assert drafter.contexts == {}


def test_preemption_repeats_no_verify_step(scripted):
    """The histogram of a preempted request equals its undisturbed one: blocks start where they always did."""
    specs = [scripted.spec(f"r{i}", [i, i + 1, i + 2], max_tokens=40) for i in range(6)]
    mix = scripted.PATTERNS["MIX"]
    roomy = scripted.run(scripted.make_loop(scripted.Drafter(mix), num_kv_pages=200), specs)
    tight_loop = scripted.make_loop(scripted.Drafter(mix), num_kv_pages=18)
    tight = scripted.run(tight_loop, specs)
    assert tight_loop.scheduler.num_preemptions > 0
    for request_id, (_, last) in roomy.items():
        assert tight[request_id][1].stats == last.stats


def test_b36_aborts_running_and_queued(scripted):
    drafter = scripted.Drafter()
    loop = scripted.make_loop(drafter, max_num_seqs=1)
    for request_id in "abc":
        loop.add(scripted.spec(request_id, [1, 2, 3], max_tokens=50))
    loop.step()
    loop.step()
    assert loop.describe()["num_requests_running"] == 1
    loop.abort("b")  # queued: never starts
    loop.abort("a")  # running
    loop.abort("unknown")
    results = scripted.run(loop)
    assert set(results) == {"c"}
    assert results["c"][0] == scripted.continuation([1, 2, 3], 50)
    assert loop.pool.num_free == loop.pool.num_pages
    assert drafter.contexts == {}


def test_b28_a_late_result_of_an_aborted_request_is_dropped(scripted):
    loop = scripted.make_loop(scripted.Drafter(), max_num_seqs=1)
    loop.add(scripted.spec("x", [1, 2], max_tokens=10))
    loop.step()
    planned = loop.scheduler.plan()
    proposals = loop._draft(planned)
    batch, result, outcomes = loop._verify(planned, proposals)
    loop.abort("x")
    loop.add(scripted.spec("y", [7, 7, 7], max_tokens=10))
    next_plan = loop.scheduler.plan()  # y takes x's place before x's result is applied
    assert next_plan[0].request.request_id == "y"
    assert loop.scheduler.commit(planned, outcomes) == []
    loop._commit_context(planned, loop._take_context(planned, outcomes, batch, result))
    for part in next_plan:
        loop.scheduler._preempt(part.request)
    assert scripted.run(loop)["y"][0] == scripted.continuation([7, 7, 7], 10)
    assert loop.pool.num_free == loop.pool.num_pages


def test_a_resumed_request_goes_on_behind_its_tokens(scripted):
    from dflash2_ray.core.messages import RequestSpec
    from dflash2_ray.core.sampling_params import SamplingParams

    prompt = (4, 5, 6)
    reference = scripted.continuation(prompt, 20)
    for emitted in (1, 7, 19):
        loop = scripted.make_loop(scripted.Drafter())
        resumed = RequestSpec("a", prompt, SamplingParams(temperature=0.0, max_tokens=20), tuple(reference[:emitted]))
        tokens, last = scripted.run(loop, [resumed])["a"]
        assert reference[:emitted] + tokens == reference
        assert last.finish_reason == "length"


def test_a_drafter_that_fails_costs_no_answer(scripted):
    class Failing(scripted.Drafter):
        calls = itertools.count()

        def collect(self, wanted, deadline_s=None):
            if next(self.calls) == 2:
                raise RuntimeError("drafter broke")
            return super().collect(wanted, deadline_s)

    loop = scripted.make_loop(Failing())
    tokens, last = scripted.run(loop, [scripted.spec("a", [1], max_tokens=30)])["a"]
    assert tokens == scripted.continuation([1], 30)
    assert last.stats["skipped_reason"] == "drafter_unavailable"
    assert last.stats["num_accepted_draft_tokens"] > 0


def test_a_failing_step_ends_its_requests_and_no_others(scripted):
    loop = scripted.make_loop(scripted.Drafter())
    loop.add(scripted.spec("a", [1], max_tokens=5))
    forward, loop.runner.forward = loop.runner.forward, None
    (delta,) = loop.step()
    assert (delta.request_id, delta.finish_reason) == ("a", "error")
    loop.runner.forward = forward
    assert scripted.run(loop, [scripted.spec("b", [1], max_tokens=5)])["b"][0] == scripted.continuation([1], 5)
    assert loop.pool.num_free == loop.pool.num_pages


def test_a_proposal_that_does_not_fit_is_dropped(scripted):
    class Stale(scripted.Drafter):
        def collect(self, wanted, deadline_s=None):
            from dataclasses import replace

            return [replace(p, base_len=p.base_len - 1) for p in super().collect(wanted, deadline_s)]

    loop = scripted.make_loop(Stale())
    tokens, last = scripted.run(loop, [scripted.spec("a", [1], max_tokens=9)])["a"]
    assert tokens == scripted.continuation([1], 9)
    assert last.stats["num_spec_steps"] == 0
    assert loop.num_dropped_proposals > 0


def test_per_request_width(scripted):
    loop = scripted.make_loop(scripted.Drafter())
    results = scripted.run(
        loop,
        [
            scripted.spec("off", [1], max_tokens=12, num_speculative_tokens=0),
            scripted.spec("one", [1], max_tokens=12, num_speculative_tokens=1),
            scripted.spec("all", [1], max_tokens=12),
        ],
    )
    assert results["off"][0] == results["one"][0] == results["all"][0]
    assert results["off"][1].stats["skipped_reason"] == "requested"
    assert results["off"][1].stats["num_spec_steps"] == 0
    assert sum(results["one"][1].stats["acceptance_histogram"][2:]) == 0
    assert results["one"][1].stats["num_accepted_draft_tokens"] > 0


def test_overload_and_bad_ids(scripted):
    loop = scripted.make_loop(scripted.Drafter(), max_num_seqs=1, max_queued_requests=1)
    loop.add(scripted.spec("a", [1], max_tokens=2))
    loop.add(scripted.spec("b", [1], max_tokens=2))
    with pytest.raises(Overloaded, match="queue is full"):
        loop.add(scripted.spec("c", [1], max_tokens=2))
    for bad in ([], [-1], [259], [2**63], [1.5], [True]):
        with pytest.raises(InvalidRequest):
            loop.add(scripted.spec("d", bad, max_tokens=2))
    assert set(scripted.run(loop)) == {"a", "b"}


def test_b27_many_short_requests_at_once(scripted):
    loop = scripted.make_loop(scripted.Drafter(), max_num_seqs=8, max_num_batched_tokens=32)
    specs = [scripted.spec(f"r{i}", [i], max_tokens=6) for i in range(8)]
    for request_id, (tokens, _) in scripted.run(loop, specs).items():
        assert tokens == scripted.continuation([int(request_id[1:])], 6)
