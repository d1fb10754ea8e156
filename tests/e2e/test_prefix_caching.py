"""Requests that start behind cached pages say what they say without: tokens, log-probabilities to the last bit, acceptance."""

import pytest

GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.fixture
def engines(embedded):
    on, off = embedded(), embedded(enable_prefix_caching=False)
    on._loop.forget_history()
    return on, off


def told(generation):
    return generation.token_ids, generation.logprobs, generation.metrics["speculative_decoding"]["acceptance_histogram"]


def accepted(generations):
    return sum(one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for one in generations)


@pytest.mark.parametrize("width", [None, 0], ids=["speculative", "plain"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_turns_of_a_conversation(engines, prompts, sampling, width):
    """Pages of the first turn come from its prefill and from its decode steps, of one row or of a verified block."""
    on, off = engines
    options = {**sampling, "max_tokens": 40, "ignore_eos": True, "logprobs": 2, "num_speculative_tokens": width}
    first = [one[:150] for one in prompts[:6]]
    answers = {}
    for engine in (on, off):
        turns = engine.generate(prompt_token_ids=first, **options)
        again = engine.generate(prompt_token_ids=first, **options)
        longer = [
            [*prompt, *turn.token_ids, *prompts[40 + i][:30]]
            for i, (prompt, turn) in enumerate(zip(first, turns, strict=True))
        ]
        answers[engine] = [turns, again, engine.generate(prompt_token_ids=longer, **options)]
    for warm, cold in zip(answers[on], answers[off], strict=True):
        assert [told(one) for one in warm] == [told(one) for one in cold]
        assert (accepted(warm) > 0) == (width is None)
    for prompt, again, longer in zip(first, answers[on][1], answers[on][2], strict=True):
        assert again.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
        assert longer.usage.cached_tokens == (len(prompt) + 39) // 16 * 16
    assert all(one.usage.cached_tokens == 0 for turn in answers[off] for one in turn)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_shared_beginnings_under_preemption_and_eviction(engines, embedded, prompts, sampling):
    _, off = engines
    tight = embedded(max_num_seqs=16, max_model_len=480, num_kv_pages=40)
    tight._loop.forget_history()
    trunks = [[*prompts[0], *prompts[1]][:90], [*prompts[2], *prompts[3]][:70]]
    asked = [[*trunks[i % 2], *prompts[20 + i][:12]] for i in range(16)]
    options = {**sampling, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
    cold = off.generate(prompt_token_ids=asked, **options)
    for _ in range(2):
        warm = tight.generate(prompt_token_ids=asked, **options)
        assert [told(one) for one in warm] == [told(one) for one in cold]
    facts = tight.describe()
    assert facts["num_preemptions"] > 0
    assert facts["prefix_cache"]["num_hit_tokens"] > 0
    assert facts["num_free_pages"] == 40
    assert accepted(warm) > 0
