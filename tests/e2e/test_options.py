"""Every option with speculation on against off: the same tokens, greedy and seeded, and drafts that were accepted."""

import pytest
import torch

PROMPTS = [
    "Once upon a time",
    "def add(a, b):\n",
    "aaaa aaaa aaaa",
    "The capital of France",
    "1 2 3 4 5 6",
    "import os\nimport",
]
NUM_TOKENS = 40
OPTIONS = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "negative frequency_penalty": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {"20": 4.0, 40: -100}},
    "allowed_token_ids": {"allowed_token_ids": list(range(10, 200))},
    "bad_words": {"bad_words": ["the", "return", "\n"]},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False},
    "min_p": {"min_p": 0.1},
    "stop_token_ids": {"stop_token_ids": [15, 220, 300]},
    "stop": {"stop": ["e", "th", " a b"]},
    "stop kept": {"stop": ["\n", "and"], "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False, "ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "n": {"n": 3},
    "all": {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {30: 2.0},
        "bad_words": ["the"],
        "min_tokens": 5,
        "stop": ["."],
    },
}


def run(engine, **options):
    return engine.generate(PROMPTS, **{"max_tokens": NUM_TOKENS, "ignore_eos": True, **options})


def told(one):
    """All that a client sees, apart from times and speculation."""
    return one.text, one.token_ids, one.finish_reason, one.stop_reason, one.usage.as_dict()


def close(one, other):
    assert len(one) == len(other)
    for (own, alternatives), (other_own, other_alternatives) in zip(one, other, strict=True):
        assert own == pytest.approx(other_own, abs=1e-4)
        assert [token for token, _ in alternatives] == [token for token, _ in other_alternatives]


@pytest.mark.parametrize("law", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_speculation_changes_nothing(embedded, name, law):
    engine = embedded(max_num_seqs=4)
    plain = run(engine, num_speculative_tokens=0, **OPTIONS[name], **law)
    fast = run(engine, **OPTIONS[name], **law)
    assert [told(one) for one in fast] == [told(one) for one in plain]
    stats = [one.metrics["speculative_decoding"] for one in fast]
    assert sum(one["num_accepted_draft_tokens"] for one in stats) > 0
    for one, stat in zip(fast, stats, strict=True):  # B03, B12: counted on what was delivered
        assert 1 + stat["num_spec_steps"] + stat["num_accepted_draft_tokens"] + stat["num_plain_steps"] == len(
            one.token_ids
        )
        assert one.usage.completion_tokens == len(one.token_ids)
    if name == "logprobs":
        for one, other in zip(fast, plain, strict=True):
            close(one.logprobs, other.logprobs)
            assert len(one.logprobs) == len(one.token_ids)
            if law["temperature"] == 0:
                assert all(
                    alternatives[0] == (token, own)
                    for token, (own, alternatives) in zip(one.token_ids, one.logprobs, strict=True)
                )
    if name not in ("min_p", "logprobs", "n", "skip_special_tokens", "min_tokens"):
        without = run(engine, num_speculative_tokens=0, **law)
        assert [told(one) for one in without] != [told(one) for one in plain], "the option does something"


def test_choices_are_those_of_their_seeds(embedded):
    engine = embedded(max_num_seqs=4)
    together = engine.generate(PROMPTS[0], n=3, temperature=1.0, seed=20, max_tokens=12, ignore_eos=True)
    alone = [
        engine.generate(PROMPTS[0], temperature=1.0, seed=20 + index, max_tokens=12, ignore_eos=True)[0]
        for index in range(3)
    ]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in together}) == 3


def test_a_stream_says_what_the_whole_answer_says(embedded):
    engine = embedded(max_num_seqs=4)
    options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stop": ["th", "e"], "logprobs": 1}
    (whole,) = engine.generate(PROMPTS[0], **options)
    chunks = list(engine.stream(PROMPTS[0], **options))
    assert "".join(chunk.text for chunk in chunks) == whole.text == chunks[-1].generation.text
    assert chunks[-1].generation.logprobs == whole.logprobs
    assert "th" not in whole.text
    assert whole.stop_reason in ("th", "e")
    assert not engine._loop.has_work, "what a stop string ended is cancelled"


def test_prompt_logprobs_are_those_of_one_pass(embedded):
    """Over prefill chunks and neighbours."""
    engine = embedded(max_num_seqs=4, max_num_batched_tokens=32)
    prompt = engine.tokenizer.encode("Once upon a time there was a little girl who liked to play in the garden. " * 3)
    (one, _) = engine.generate(
        prompt_token_ids=[prompt, prompt[:9]], prompt_logprobs=2, max_tokens=8, temperature=0.0, ignore_eos=True
    )
    assert len(one.prompt_logprobs) == len(prompt) > 40
    assert one.prompt_logprobs[0] is None
    (rest,) = engine.generate(prompt_token_ids=prompt[:20], prompt_logprobs=0, max_tokens=1)
    wanted = [own for own, _ in one.prompt_logprobs[1:20]]
    assert torch.tensor([own for own, _ in rest.prompt_logprobs[1:]]) == pytest.approx(torch.tensor(wanted), abs=1e-4)
    assert one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_options_that_leave_no_token_end_with_an_error_that_names_one(embedded):
    from dflash2_ray.errors import InvalidRequest

    engine = embedded(max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="exclude every token") as caught:
        engine.generate("a", allowed_token_ids=[7], min_tokens=4, stop_token_ids=[7], max_tokens=8)
    assert caught.value.param in ("allowed_token_ids", "min_tokens")
    assert engine.generate("a", max_tokens=2, temperature=0.0)[0].token_ids
