"""Options that shape logits: every row of a block against a plain reference that knows one row and its own past."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_ray.sampling.logprobs import token_logprobs
from dflash2_ray.sampling.shaping import LogitShaper

VOCAB = 11
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def reference(row, prompt, past, options, ending):
    """One row of plain decoding behind `past`, token by token, in Python numbers."""
    row = row.tolist()
    allowed = options.get("allowed_token_ids")
    for token in range(VOCAB):
        if allowed is not None and token not in allowed:
            row[token] = float("-inf")
        for word in options.get("bad_words", ()):
            head = list(word[:-1])
            if word[-1] == token and (not head or past[-len(head) :] == head):
                row[token] = float("-inf")
        if token in ending and len(past) < options.get("min_tokens", 0):
            row[token] = float("-inf")
        row[token] += dict(options.get("logit_bias", ())).get(token, 0.0)
        repetition = options.get("repetition_penalty", 1.0)
        if repetition != 1.0 and (token in prompt or token in past):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        count = past.count(token)
        row[token] -= options.get("frequency_penalty", 0.0) * count + options.get("presence_penalty", 0.0) * (count > 0)
    return row


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.25, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "logit_bias": st.lists(
            st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 100.0])),
            max_size=3,
            unique_by=lambda pair: pair[0],
        ),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        "bad_words": st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=3),
        "min_tokens": st.integers(0, 8),
    },
)


@given(prompt=TOKENS, output=TOKENS, drafts=TOKENS, more=TOKENS, options=OPTIONS, seed=st.integers(0, 99))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_every_row_is_the_plain_row_behind_its_drafts(prompt, output, drafts, more, options, seed):
    ending = {3, 5}
    shaper = LogitShaper(prompt=prompt, ending_token_ids=ending, **options)
    for past in (output, output + more):  # a second step of the same request, with what it has counted already
        logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
        wanted = [reference(row, prompt, past + drafts[:index], options, ending) for index, row in enumerate(logits)]
        shaper.shape(logits, past, drafts)
        torch.testing.assert_close(logits, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_logprobs_are_those_of_the_row_and_ties_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    first, second = token_logprobs(logits, [2, 4], 3)
    rows = torch.log_softmax(logits, -1)
    assert first[0] == pytest.approx(rows[0, 2].item())
    assert [token for token, _ in first[1]] == [1, 3, 2]
    assert [token for token, _ in second[1]] == [0, 1, 2]
    assert token_logprobs(logits, [0, 0], 0)[0][1] == ()
    assert len(token_logprobs(logits, [0, 0], 20)[0][1]) == 5


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_alternatives_are_a_sort_by_value_then_id_whatever_ties(levels):
    logits = torch.randint(0, levels, (9, 40), generator=torch.Generator().manual_seed(levels)).float() / 4
    rows = torch.log_softmax(logits, -1).tolist()
    for count in (1, 3, 20, 40):
        for row, (_, best) in zip(rows, token_logprobs(logits, [0] * 9, count), strict=True):
            assert list(best) == sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))[:count]
