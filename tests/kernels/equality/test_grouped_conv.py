"""The convolution's kernel against its reference: bit-equal, as both round after every multiplication and addition."""

import pytest
import torch

from dflash2_kernels.grouped_conv import OPERATOR, grouped_conv, grouped_conv_reference

SHAPES = [  # blocks, rows, channels, taps, groups
    (2, 5, 6, 3, 2),
    (1, 1, 4, 3, 2),
    (3, 1, 5, 1, 5),
    (1, 7, 7, 4, 1),
    (5, 7, 160, 2, 10),
    (3, 8, 272, 2, 17),
    (1, 16, 128, 2, 8),
    (2, 19, 48, 2, 3),
    (0, 4, 8, 3, 2),
]


def operands(shape, dtype, device):
    blocks, rows, channels, taps, groups = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((blocks, rows, channels), (blocks, rows, taps, groups), (taps, channels))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_reference(shape, dtype, device):
    one = operands(shape, dtype, device)
    assert OPERATOR.uses_kernel(*one)
    assert torch.equal(grouped_conv(*one), grouped_conv_reference(*one))


@pytest.mark.parametrize("which", range(3), ids=["x", "dynamic", "base"])
def test_any_layout(which, strided, device):
    one = operands((3, 5, 16, 3, 4), torch.bfloat16, device)
    expected = grouped_conv_reference(*one)
    one[which] = strided(one[which])
    assert torch.equal(grouped_conv(*one), expected)


def test_a_side_of_the_projection_and_types_that_differ(device):
    x, _, base = operands((3, 8, 32, 2, 4), torch.bfloat16, device)
    both = torch.randn(3, 8, 2, 2, 4, generator=torch.Generator().manual_seed(1)).to(device)
    for side in range(2):
        assert torch.equal(grouped_conv(x, both[:, :, side], base), grouped_conv_reference(x, both[:, :, side], base))


def test_taps_never_cross_a_blocks_edge(device):
    x, dynamic, base = operands((6, 5, 40, 3, 5), torch.float32, device)
    expected = grouped_conv(x, dynamic, base)
    x[2], dynamic[2] = torch.nan, torch.inf
    others = [0, 1, 3, 4, 5]
    assert torch.equal(grouped_conv(x, dynamic, base)[others], expected[others])


def test_rows_before_the_block_are_not_multiplied(device):
    x, dynamic, base = operands((2, 4, 32, 2, 2), torch.float32, device)
    dynamic[:, 0, 1] = torch.inf
    assert torch.isfinite(grouped_conv(x, dynamic, base)[:, 0]).all()
