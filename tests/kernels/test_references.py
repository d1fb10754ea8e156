"""The operators' torch references: the convolution against a written-out loop, the lattice against einsum, and the
properties of the walk and of its inverse CDF."""

import itertools

import pytest
import torch

from dflash2_kernels.grouped_conv import grouped_conv, grouped_conv_reference
from dflash2_kernels.selector_walk import follow, follow_best, inverse_cdf, selector_lattice_reference

LAST = 1 - 2.0**-24


def loop(x, dynamic, base):
    """The convolution's definition, one number at a time, in double."""
    blocks, rows, channels = x.shape
    taps, groups = dynamic.shape[2:]
    width = channels // groups
    x, dynamic, base = x.double().tolist(), dynamic.double().tolist(), base.double().tolist()
    y = torch.zeros(blocks, rows, channels, dtype=torch.float64)
    for n, i, channel in itertools.product(range(blocks), range(rows), range(channels)):
        y[n, i, channel] = sum(
            (base[t][channel] + dynamic[n][i][t][channel // width]) * x[n][i - t][channel]
            for t in range(min(i, taps - 1) + 1)
        )
    return y


def operands(blocks, rows, channels, taps, groups, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(blocks, rows, channels, generator=generator).to(dtype),
        torch.randn(blocks, rows, taps, groups, generator=generator).to(dtype),
        torch.randn(taps, channels, generator=generator).to(dtype),
    )


SHAPES = [  # blocks, rows, channels, taps, groups
    (2, 5, 6, 3, 2),
    (1, 1, 4, 3, 2),
    (3, 1, 5, 1, 5),
    (1, 7, 7, 4, 1),
    (2, 3, 9, 5, 3),
    (2, 4, 8, 4, 8),
    (1, 16, 12, 2, 4),
    (0, 4, 8, 3, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_conv_is_its_definition(shape, dtype):
    x, dynamic, base = operands(*shape, dtype)
    copies = [one.clone() for one in (x, dynamic, base)]
    got = grouped_conv(x, dynamic, base)
    assert got.dtype == dtype
    assert got.shape == x.shape
    expected = loop(x, dynamic, base)
    assert torch.allclose(got.double(), expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2**-8)
    assert all(torch.equal(now, before) for now, before in zip((x, dynamic, base), copies, strict=True))


def test_grouped_conv_accumulates_in_fp32():
    x, dynamic, base = operands(1, 8, 8, 8, 2, torch.bfloat16)
    got = grouped_conv(x, dynamic, base)
    assert torch.equal(got, grouped_conv(x.float(), dynamic.float(), base.float()).to(torch.bfloat16))


def strided(one, how):
    """The same values in another layout."""
    if how == "every second":
        big = torch.full([*one.shape[:-1], 2 * one.shape[-1]], 9.0, dtype=one.dtype)
        big[..., ::2] = one
        return big[..., ::2]
    if how == "row of a wider tensor":
        big = torch.full([one.shape[0], *one.shape[1:-1], one.shape[-1] + 3], 9.0, dtype=one.dtype)
        big[..., 1:-2] = one
        return big[..., 1:-2]
    order = list(reversed(range(one.dim()))) if how == "reversed" else [*range(1, one.dim()), 0]
    inverse = [order.index(i) for i in range(one.dim())]
    return one.permute(order).contiguous().permute(inverse)


@pytest.mark.parametrize("how", ["every second", "row of a wider tensor", "reversed", "rolled"])
@pytest.mark.parametrize("which", ["x", "dynamic", "base", "all"])
def test_grouped_conv_takes_any_layout(how, which):
    x, dynamic, base = operands(3, 5, 8, 3, 4)
    expected = grouped_conv(x, dynamic, base)
    if which in ("x", "all"):
        x = strided(x, how)
    if which in ("dynamic", "all"):
        dynamic = strided(dynamic, how)
    if which in ("base", "all"):
        base = strided(base, how)
    assert torch.equal(grouped_conv(x, dynamic, base), expected)


def test_taps_never_cross_a_blocks_edge():
    x, dynamic, base = operands(4, 5, 8, 4, 2)
    together = grouped_conv(x, dynamic, base)
    for block in range(4):
        assert torch.equal(grouped_conv(x[block : block + 1], dynamic[block : block + 1], base)[0], together[block])
    spoiled = x.clone()
    spoiled[1] = torch.nan
    others = [0, 2, 3]
    assert torch.equal(grouped_conv(spoiled, dynamic, base)[others], together[others])


def test_taps_look_back_only():
    x, dynamic, base = operands(1, 6, 4, 3, 2)
    whole = grouped_conv(x, dynamic, base)
    for row in range(6):
        later = x.clone()
        later[:, row + 1 :] = torch.nan
        assert torch.equal(grouped_conv(later, dynamic, base)[:, : row + 1], whole[:, : row + 1])
        early = x.clone()
        early[:, : max(0, row - 2)] = torch.nan
        assert torch.equal(grouped_conv(early, dynamic, base)[:, row], whole[:, row])


@pytest.mark.parametrize(
    ("x", "dynamic", "base"),
    [
        ((5, 8), (1, 5, 3, 2), (3, 8)),
        ((1, 5, 8), (5, 3, 2), (3, 8)),
        ((1, 5, 8), (1, 5, 3, 2), (3, 8, 1)),
        ((1, 5, 8), (1, 4, 3, 2), (3, 8)),
        ((2, 5, 8), (1, 5, 3, 2), (3, 8)),
        ((1, 5, 8), (1, 5, 3, 2), (2, 8)),
        ((1, 5, 8), (1, 5, 3, 2), (3, 4)),
        ((1, 5, 8), (1, 5, 3, 3), (3, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, dynamic, base):
    with pytest.raises(ValueError, match="grouped_conv"):
        grouped_conv(torch.zeros(x), torch.zeros(dynamic), torch.zeros(base))


def test_the_operator_is_its_reference_here():
    one = operands(2, 5, 6, 3, 2)
    assert torch.equal(grouped_conv(*one), grouped_conv_reference(*one))


# ---- the selector ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("blocks", "slots", "candidates", "rank"), [(2, 3, 4, 5), (1, 1, 1, 1), (3, 7, 16, 32), (1, 2, 9, 3)]
)
def test_the_lattice_is_the_sum_over_the_rank(blocks, slots, candidates, rank, dtype):
    generator = torch.Generator().manual_seed(0)
    unary = torch.randn(blocks, slots, candidates, generator=generator)
    predecessors, successors = (
        torch.randn(blocks, slots, candidates, rank, generator=generator).to(dtype) for _ in range(2)
    )
    hidden = torch.randn(blocks, slots, rank, generator=generator).to(dtype)
    got = selector_lattice_reference(unary, predecessors, hidden, successors)
    expected = unary.double()[:, :, None] + torch.einsum(
        "nspr,nsr,nscr->nspc", predecessors.double(), hidden.double(), successors.double()
    )
    assert got.dtype == torch.float32
    assert got.shape == (blocks, slots, candidates, candidates)
    assert torch.allclose(got.double(), expected, atol=1e-4, rtol=1e-5)
    if candidates > 1:
        assert not torch.allclose(got.transpose(-1, -2).double(), expected, atol=1e-2)


def test_follow_walks_from_the_anchor():
    assert follow(torch.zeros(2, 0, 3, dtype=torch.int64)).shape == (2, 0)
    assert follow(torch.tensor([[[2, 0, 1]]])).tolist() == [[2]]
    assert follow(torch.tensor([[[2, 0, 1], [9, 9, 1], [7, 5, 7]]])).tolist() == [[2, 1, 5]]


def test_follow_is_the_walk_step_by_step():
    generator = torch.Generator().manual_seed(0)
    for blocks, slots, candidates in ((1, 1, 1), (1, 8, 6), (5, 3, 2), (64, 7, 16)):
        scores = torch.randint(
            0, 4, (blocks, slots, candidates, candidates), generator=generator
        ).float()  # full of ties
        choices = scores.argmax(-1)
        for path in (follow(choices).tolist(), follow_best(scores).tolist()):
            for own, chosen in zip(path, choices.tolist(), strict=True):
                assert own[0] == chosen[0][0]
                assert all(own[t] == chosen[t][own[t - 1]] for t in range(1, slots))


# ---- inverse CDF ----------------------------------------------------------------------------------------------------


def test_inverse_cdf_at_the_edges():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for uniform, expected in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (LAST, 4)):
        assert int(inverse_cdf(probs, torch.tensor(uniform))) == expected
        assert int(inverse_cdf(probs * 8, torch.tensor(uniform))) == expected, "probabilities need no norm"


def test_inverse_cdf_never_takes_probability_zero():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(200, 3, 16, generator=generator) ** 6 * (torch.rand(200, 3, 16, generator=generator) < 0.4)
    probs[..., 5] += 1e-6
    for uniform in (0.0, 2.0**-24, 0.3, 0.999, LAST, 1.0):
        index = inverse_cdf(probs, torch.full((200, 3), uniform))
        assert index.dtype == torch.int64
        assert (probs.gather(-1, index[..., None]) > 0).all()


def test_inverse_cdf_is_monotone_and_has_the_law():
    probs = torch.tensor([3.0, 0.0, 1.0, 4.0])
    index = inverse_cdf(probs.expand(800, 4), (torch.arange(800) + 0.5) / 800)
    assert (index.diff() >= 0).all()
    assert torch.bincount(index, minlength=4).tolist() == [300, 0, 100, 400]


def test_inverse_cdf_rows_do_not_depend_on_each_other():
    generator = torch.Generator().manual_seed(1)
    probs, uniforms = torch.rand(40, 7, generator=generator), torch.rand(40, generator=generator)
    together = inverse_cdf(probs, uniforms)
    assert together.tolist() == [int(inverse_cdf(probs[i], uniforms[i])) for i in range(40)]
    assert together.tolist() == [
        next(
            c
            for c in range(7)
            if float(probs[i, : c + 1].double().sum()) > float(uniforms[i]) * float(probs[i].double().sum())
        )
        for i in range(40)
    ]
