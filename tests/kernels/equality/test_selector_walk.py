"""The selector's walk: the kernel against its reference. Where every sum is exact, ids and rows are equal to the bit; elsewhere scores
differ in their last bits, so ids may differ only at a decision that near."""

import pytest
import torch

from dflash2_kernels import selector_walk as module
from dflash2_kernels.noise import exponentials_reference, uniforms_reference
from dflash2_kernels.selector_walk import DRAW, GREEDY, PADDING, RACE, selector_walk, selector_walk_reference

VOCAB = 500
SEEDS = [0, 2**40 + 9, -1, 77, -(2**63), 3]
BASES = [0, 11, 2**33, 600, 5, 2]


def operands(device, requests=6, slots=5, candidates=9, rank=24, dtype=torch.float32, rules=None, exact=False, seed=0):
    """exact: whole numbers and few bits, so that no sum rounds, whatever its order; many scores tie."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        if exact:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(*shape, generator=generator)

    ids = torch.rand(requests, slots, VOCAB, generator=generator).argsort(-1)[..., :candidates].sort(-1).values
    kinds = rules or [(GREEDY, DRAW, RACE)[r % 3] for r in range(requests)]
    temperatures = [1.0, 0.5, 2.0, 4.0, 0.25, 1.0] if exact else [0.7, 1.0, 1.3, 0.2, 2.0, 0.9]
    own = [
        normal(requests, slots, candidates), ids, normal(requests, slots, rank).to(dtype),
        normal(VOCAB, rank).to(dtype), normal(VOCAB, rank).to(dtype), torch.randint(0, VOCAB, (requests,), generator=generator),
        torch.tensor((temperatures * requests)[:requests]), torch.tensor(kinds, dtype=torch.int32),
        torch.tensor((SEEDS * requests)[:requests], dtype=torch.int64), torch.tensor((BASES * requests)[:requests], dtype=torch.int64),
    ]  # fmt: skip
    return [one.to(device) for one in own]


def check(own, least_margin=1e-4):
    """Ids equal, rows near; a path that leaves the reference's must do so at a decision within `least_margin`."""
    tokens, probs = selector_walk(*own)
    expected, rows = selector_walk_reference(*own)
    for r in range(tokens.shape[0]):
        apart = (tokens[r] != expected[r]).nonzero()
        same = int(apart[0]) if len(apart) else tokens.shape[1]
        torch.testing.assert_close(probs[r, : same + 1], rows[r, : same + 1], atol=2e-5, rtol=2e-4)
        assert same == tokens.shape[1] or margin(own, r, same, rows[r, same]) < least_margin, (r, same)
    return tokens, probs


def margin(own, request, slot, row):
    """How near the decision of a slot is to another one, in units of probability."""
    rule, seed, position = int(own[7][request]), own[8][request : request + 1], own[9][request : request + 1] + 1 + slot
    if rule == DRAW:
        return float(
            (row.double().cumsum(0) / row.double().sum() - uniforms_reference(seed, position, 0).double()).abs().min()
        )
    value = row.double()
    if rule == RACE:
        value = value / exponentials_reference(seed, position, own[1][request, slot][None])[0]
    best = value.topk(2).values
    return float((best[0] - best[1]) / best[0]) if rule == RACE else 0.0


def test_the_kernel_is_what_runs_here(device):
    assert module.OPERATOR.implementation(device) in ("triton", "triton interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("requests", "slots", "candidates", "rank"),
    [(6, 5, 9, 24), (1, 1, 1, 1), (3, 7, 16, 256), (3, 2, 17, 33), (0, 3, 4, 8), (2, 0, 4, 8)],
)
def test_is_its_reference(device, requests, slots, candidates, rank, dtype):
    tokens, probs = check(operands(device, requests, slots, candidates, rank, dtype))
    assert tokens.shape == (requests, slots)
    assert probs.shape == (requests, slots, candidates)


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_equal_to_the_bit_where_scores_are_exact(device, seed):
    own = operands(device, slots=7, candidates=16, rank=32, exact=True, seed=seed)
    tokens, probs = selector_walk(*own)
    expected, rows = selector_walk_reference(*own)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(probs, rows, atol=0, rtol=1e-6)
    assert len({tuple(row) for row in tokens.tolist()}) == 6


def test_a_tie_goes_to_the_lower_candidate(device):
    own = operands(device, rules=[GREEDY] * 6)
    for index in (0, 2):
        own[index] = torch.zeros_like(own[index])
    tokens, probs = selector_walk(*own)
    assert torch.equal(tokens, own[1][:, :, 0])
    assert torch.equal(probs, torch.nn.functional.one_hot(torch.zeros(6, 5, dtype=torch.int64), 9).float().to(device))


def test_tokens_are_drawn_from_the_rows_that_come_out(device):
    """The very row: the drawn candidate is the one whose share of the row's cumulated sum holds the uniform."""
    own = operands(device, rules=[DRAW] * 6, slots=7)
    tokens, probs = selector_walk(*own)
    positions = own[9][:, None] + 1 + torch.arange(7, device=device)
    uniforms = uniforms_reference(own[8][:, None].expand(6, 7), positions, 0)
    chosen = module.inverse_cdf(probs, uniforms)
    assert torch.equal(own[1].gather(-1, chosen[:, :, None])[:, :, 0], tokens)
    assert (chosen != probs.argmax(-1)).sum() > 5


def test_a_race_is_won_in_the_rows_that_come_out(device):
    own = operands(device, rules=[RACE] * 6, slots=7)
    tokens, probs = selector_walk(*own)
    positions = (own[9][:, None] + 1 + torch.arange(7, device=device)).reshape(-1)
    seeds = own[8][:, None].expand(6, 7).reshape(-1)
    noise = exponentials_reference(seeds, positions, own[1].flatten(0, 1)).view(probs.shape)
    assert torch.equal(own[1].gather(-1, (probs.double() / noise).argmax(-1, keepdim=True))[:, :, 0], tokens)


def test_a_slots_noise_is_its_seeds_and_positions(device):
    """Another batch, another place in it, fewer slots: the same draws. Another seed or position: others."""
    own = operands(device, rules=[DRAW, RACE] * 3)
    tokens, probs = selector_walk(*own)
    order = torch.tensor([4, 1, 0, 5], device=device)
    turned = [one if index in (3, 4) else one[order] for index, one in enumerate(own)]
    again, rows = selector_walk(*turned)
    assert torch.equal(again, tokens[order])
    assert torch.equal(rows, probs[order])
    short = [one[:, :2] if index < 3 else one for index, one in enumerate(own)]
    assert torch.equal(selector_walk(*short)[0], tokens[:, :2])
    for index in (8, 9):
        moved = [one + 1 if place == index else one for place, one in enumerate(own)]
        assert not torch.equal(selector_walk(*moved)[0], tokens)


def test_without_a_selector(device):
    own = operands(device, candidates=130)
    own[2] = own[3] = own[4] = None
    tokens, _ = check(own)
    greedy = own[1].gather(-1, own[0].argmax(-1, keepdim=True))[:, :, 0]
    assert torch.equal(tokens[[0, 3]], greedy[[0, 3]])


def test_padding_requests_are_not_read(device):
    own = operands(device, rules=[PADDING, DRAW, PADDING, RACE, GREEDY, -7])
    expected, rows = (one.clone() for one in selector_walk(*own))
    own[5][0], own[1][2], own[5][5] = 1 << 40, -(1 << 40), -1
    own[0][0], own[6][2] = torch.nan, 0.0
    tokens, probs = selector_walk(*own)
    assert torch.equal(tokens, expected)
    assert torch.equal(probs, rows)
    assert not tokens[[0, 2, 5]].any()
    assert not probs[[0, 2, 5]].any()
    own[7][:] = PADDING
    assert not selector_walk(*own)[0].any()


def test_strided_operands(device):
    own = operands(device)
    expected = selector_walk(*own)
    for index in range(5):
        wide = torch.zeros(*own[index].shape[:-1], own[index].shape[-1] + 5, dtype=own[index].dtype, device=device)
        wide[..., 2:-3] = own[index]
        own[index] = wide[..., 2:-3]
    assert all(torch.equal(one, other) for one, other in zip(selector_walk(*own), expected, strict=True))
