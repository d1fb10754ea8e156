"""The walk's reference: one step after another by its definition, padding, and what it refuses."""

import pytest
import torch

from dflash2_kernels.noise import exponentials_reference, uniforms_reference
from dflash2_kernels.selector_walk import (
    DRAW,
    GREEDY,
    PADDING,
    RACE,
    inverse_cdf,
    selector_walk,
    selector_walk_reference,
)


def operands(rules, slots=4, candidates=6, rank=5):
    generator = torch.Generator().manual_seed(0)
    requests = len(rules)
    ids = torch.rand(requests, slots, 90, generator=generator).argsort(-1)[..., :candidates].sort(-1).values
    return [
        torch.randn(requests, slots, candidates, generator=generator), ids,
        torch.randn(requests, slots, rank, generator=generator), *(torch.randn(90, rank, generator=generator) for _ in range(2)),
        torch.randint(0, 90, (requests,), generator=generator), torch.rand(requests, generator=generator) + 0.3,
        torch.tensor(rules, dtype=torch.int32), torch.arange(requests) * 1000 - 1, torch.arange(requests) * 50,
    ]  # fmt: skip


@pytest.mark.parametrize("with_selector", [True, False])
def test_the_reference_is_the_walk_step_by_step(with_selector):
    own = operands([GREEDY, DRAW, RACE, PADDING, DRAW])
    if not with_selector:
        own[2:5] = [None, None, None]
    unary, ids, hidden, before, after, anchors, temperatures, rules, seeds, bases = own
    tokens, probs = selector_walk_reference(*own)
    for r, rule in enumerate(rules.tolist()):
        if rule == PADDING:
            assert not tokens[r].any()
            assert not probs[r].any()
            continue
        previous = int(anchors[r])
        for slot in range(4):
            score = unary[r, slot]
            if with_selector:
                score = score + (before[previous] * hidden[r, slot]) @ after[ids[r, slot]].T
            q = torch.softmax(score / temperatures[r], -1)
            seed, position = seeds[r : r + 1], bases[r : r + 1] + 1 + slot
            if rule == GREEDY:
                choice = score.argmax()
                q = torch.nn.functional.one_hot(choice, 6).float()
            elif rule == DRAW:
                choice = inverse_cdf(q, uniforms_reference(seed, position, 0)[0])
            else:
                choice = (q.double() / exponentials_reference(seed, position, ids[r, slot][None])[0]).argmax()
            torch.testing.assert_close(probs[r, slot], q, atol=1e-6, rtol=1e-5)
            previous = int(ids[r, slot, choice])
            assert int(tokens[r, slot]) == previous


@pytest.mark.parametrize("rules", [[], [PADDING, PADDING], [GREEDY], [RACE, PADDING]])
def test_any_mixture(rules):
    tokens, probs = selector_walk(*operands(rules))
    assert tokens.shape == (len(rules), 4)
    assert [bool(row.any()) for row in probs] == [rule != PADDING for rule in rules]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(2, 4), "unary"),
        (0, torch.zeros(2, 4, 6, dtype=torch.bfloat16), "unary"),
        (1, torch.zeros(2, 4, 6, dtype=torch.int32), "candidate_ids"),
        (2, None, "hidden"),
        (2, torch.zeros(2, 3, 5), "hidden"),
        (4, torch.zeros(90, 6), "codebooks"),
        (5, torch.zeros(3, dtype=torch.int64), "anchors"),
        (7, torch.zeros(2, dtype=torch.int64), "rules"),
        (2, torch.zeros(2, 4, 10)[..., ::2], "contiguous"),
    ],
)
def test_operands_that_do_not_fit_are_refused(index, value, message):
    own = operands([GREEDY, DRAW])
    own[index] = value
    with pytest.raises(ValueError, match=f"selector_walk: .*{message}"):
        selector_walk(*own)
