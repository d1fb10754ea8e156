"""The fused addition and norm against the reference: the sum bit for bit, the norm to the order of one sum in fp32."""

import pytest
import torch

from dflash2_kernels.add_rms_norm import OPERATOR, add_rms_norm, add_rms_norm_reference

SHAPES = [(1, 1), (1, 2560), (2, 64), (3, 7), (5, 1000), (0, 16), (2, 3, 48), (8192,)]


def operands(shape, dtype, device, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).mul(scale).to(device, dtype) for _ in range(2))
    return x, residual, torch.randn(shape[-1:], generator=generator).to(device, dtype)


def close(got, expected):
    bound = 2e-6 if got.dtype == torch.float32 else 2.0**-7  # a last bit of bf16 may round the other way
    return torch.allclose(got.double(), expected.double(), rtol=bound, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_reference(shape, dtype, device):
    x, residual, weight = operands(shape, dtype, device)
    assert OPERATOR.uses_kernel(x, residual, weight)
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    expected_y, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert close(y, expected_y)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_eps_and_large_rows(scale, device):
    one = operands((4, 96), torch.float32, device, scale)
    for eps in (1e-6, 1e-2):
        assert close(add_rms_norm(*one, eps)[0], add_rms_norm_reference(*one, eps)[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_layout(which, strided, device):
    one = list(operands((5, 96), torch.float32, device))
    expected = add_rms_norm(*one, 1e-6)
    one[which] = strided(one[which])
    got = add_rms_norm(*one, 1e-6)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_rows_do_not_depend_on_each_other(device):
    x, residual, weight = operands((7, 320), torch.bfloat16, device)
    together = add_rms_norm(x, residual, weight, 1e-6)[0]
    for row in range(7):
        assert torch.equal(add_rms_norm(x[row], residual[row], weight, 1e-6)[0], together[row])
