"""Greedy: speculation changes no token, in fp32, at any concurrency, cold and under preemption; nor does our engine
against transformers' own generate."""

import pytest
import torch

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def plain(embedded, prompts):
    """Plain decoding, one request at a time."""
    engine = embedded(max_num_seqs=1)
    return [
        g.token_ids
        for g in engine.generate(
            prompt_token_ids=prompts[:200],
            temperature=0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            num_speculative_tokens=0,
        )
    ]


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_speculative_equals_plain(embedded, prompts, plain, concurrency):
    engine = embedded(max_num_seqs=concurrency)
    results = engine.generate(prompt_token_ids=prompts[:200], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert len(results) == 200
    assert [g.token_ids for g in results] == plain
    accepted = sum(g.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for g in results)
    assert accepted > 200 * NEW_TOKENS / 3


def test_plain_in_company_equals_plain_alone(embedded, prompts, plain):
    results = embedded(max_num_seqs=16).generate(
        prompt_token_ids=prompts[:200], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, num_speculative_tokens=0
    )
    assert [g.token_ids for g in results] == plain


def test_under_preemption(embedded, prompts, plain):
    engine = embedded(max_num_seqs=16, max_model_len=480, num_kv_pages=40)
    before = engine.describe()["num_preemptions"]
    results = engine.generate(prompt_token_ids=prompts[:200], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert engine.describe()["num_preemptions"] > before
    assert [g.token_ids for g in results] == plain
    assert sum(g.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for g in results) > 0
    assert engine.describe()["num_free_pages"] == 40


def test_small_chunks_of_prefill(embedded, prompts, plain):
    engine = embedded(max_num_seqs=2, max_num_batched_tokens=17)
    results = engine.generate(prompt_token_ids=prompts[:40], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert [g.token_ids for g in results] == plain[:40]


def test_against_transformers_generate(hf_target, prompts, plain):
    picked = range(0, 200, 5)
    for index in picked:
        ids = torch.tensor([prompts[index]])
        out = hf_target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out[0, ids.shape[1] :].tolist() == plain[index], f"prompt {index}"


def test_stops_at_end_of_text(embedded, prompts, plain):
    engine = embedded(max_num_seqs=16)
    results = engine.generate(prompt_token_ids=prompts[:60], temperature=0, max_tokens=NEW_TOKENS)
    ended = 0
    for result, reference in zip(results, plain[:60], strict=True):
        if 2 in reference:
            assert result.token_ids == reference[: reference.index(2) + 1]
            assert result.finish_reason == "stop"
            ended += 1
        else:
            assert result.token_ids == reference
            assert result.finish_reason == "length"
    assert ended > 20
