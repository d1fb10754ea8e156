"""Packed linear layers: they equal `F.linear`, and a row's result is the same bits in a batch of any size."""

import pytest
import torch
from torch.nn import functional as F

from dflash2_ray.models import linear
from dflash2_ray.models.linear import PackedLinear, compute_dtype, has_native_bf16, padded_rows

SHAPES = [
    (256, 256),
    (256, 640),
    (2048, 256),
    (576, 1536),
    (512, 2048),
    (100, 72),
    (33, 65),
    (7, 3),
    (1, 257),
    (513, 31),
]
COUNTS = [*range(1, 41), 100, 129, 200]
DTYPES = [torch.float32, torch.bfloat16]


def fp16_operator_missing():
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.ones(4, 4), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return True
    return False


needs_fp16 = pytest.mark.skipif(fp16_operator_missing(), reason="this build has no FBGEMM fp16 product")


def make(shape, dtype, seed=0, bias=False):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)
    return weight, torch.randn(shape[0], generator=generator) if bias else None


def fp16_layer(weight, bias):
    """A layer on the fp16 product, whatever this machine would choose; None where the product refuses the weight."""
    product = linear._fp16_product(weight, bias)
    if product is None:
        return None
    layer = PackedLinear(weight, bias)
    layer._product = product
    return layer


def inputs(rows, features, seed=1):
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_plain_product(shape, dtype, bias):
    weight, offset = make(shape, dtype, bias=bias)
    packed = PackedLinear(weight, offset)
    assert (packed.out_features, packed.in_features) == shape
    for rows in (1, 2, 5, 48, 130):
        x = inputs(rows, shape[1])
        before = x.clone()
        got = packed(x)
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        assert torch.equal(x, before), "the input is the caller's"
        assert got.dtype == torch.float32
        assert got.shape == (rows, shape[0])
        # input rounded to bf16, and oneDNN's output
        rounded = dtype == torch.bfloat16 and packed.backend in ("onednn", "avx512_bf16")
        tolerance = 2e-2 if rounded else 1e-5
        assert torch.allclose(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_backends_are_what_the_machine_can_do():
    names = {dtype: PackedLinear(make((64, 64), dtype)[0]).backend for dtype in DTYPES}
    assert names[torch.float32] in ("onednn", "plain")
    assert names[torch.bfloat16] in (
        ("avx512_bf16", "onednn", "plain") if has_native_bf16() else ("fp16", "onednn", "plain")
    )


def test_without_onednn_the_plain_product_serves(monkeypatch):
    monkeypatch.setattr(linear, "_onednn_operator", lambda weight, tolerance: None)
    monkeypatch.setattr(linear, "has_native_bf16", lambda: True)
    monkeypatch.setattr(linear.bf16_linear, "available", lambda: False)
    for dtype in DTYPES:
        weight, bias = make((40, 24), dtype, bias=True)
        packed = PackedLinear(weight, bias)
        assert packed.backend == "plain"
        x = inputs(9, 24)
        assert torch.allclose(packed(x), F.linear(x, weight.float(), bias), atol=1e-5)
        assert torch.allclose(packed(x[:1]), F.linear(x[:1], weight.float(), bias), atol=1e-5)


@needs_fp16
def test_without_native_bf16_the_fp16_product_serves(monkeypatch):
    monkeypatch.setattr(linear, "has_native_bf16", lambda: False)
    monkeypatch.setattr(linear.bf16_linear, "available", lambda: False)
    weight, bias = make((40, 24), torch.bfloat16, bias=True)
    packed = PackedLinear(weight, bias)
    assert packed.backend == "fp16"
    x = inputs(9, 24)
    assert torch.allclose(packed(x), F.linear(x, weight.float(), bias), atol=1e-5)
    spread = weight.clone()
    spread[0, 0], spread[0, 1] = 2.0**20, 1.01 * 2.0**-20
    assert PackedLinear(spread).backend in ("onednn", "plain")
    assert torch.allclose(PackedLinear(spread)(x), F.linear(x, spread.float()), rtol=1e-5, atol=1e-5)


def test_a_wrong_onednn_product_is_not_used(monkeypatch):
    class Wrong:
        def default(self, x, packed, *rest):
            return torch.zeros(x.shape[0], 40, dtype=x.dtype)

    class Operators:
        _reorder_linear_weight = staticmethod(lambda weight: weight)
        _linear_pointwise = Wrong()

    monkeypatch.setattr(linear.torch.ops, "mkldnn", Operators(), raising=False)
    assert linear._onednn_operator(make((40, 24), torch.float32)[0], 1e-4) is None


# ---- rows do not depend on how many there are -----------------------------------------------------------------------


def check_rows(product, in_features):
    """Every count of rows, and every place in a bigger batch, gives the bits of the biggest batch."""
    x = inputs(260, in_features, seed=5)
    whole = product(x)
    for count in COUNTS:
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows differ"
        assert torch.equal(product(x[260 - count :].clone()), whole[260 - count :]), f"the last {count} rows differ"
    for row in (0, 1, 7, 100, 259):
        assert torch.equal(product(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_equal_bit_for_bit_in_any_batch(shape, dtype):
    weight, bias = make(shape, dtype, bias=True)
    check_rows(PackedLinear(weight, bias), shape[1])


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_rows_are_equal_with_onednn_alone(shape, monkeypatch):
    monkeypatch.setattr(linear.bf16_linear, "available", lambda: False)
    weight, bias = make(shape, torch.bfloat16, bias=True)
    check_rows(PackedLinear(weight, bias), shape[1])


@needs_fp16
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp16_rows_are_equal_bit_for_bit_in_any_batch(shape):
    weight, bias = make(shape, torch.bfloat16, bias=True)
    check_rows(fp16_layer(weight, bias), shape[1])


@pytest.mark.parametrize("num_rows", [*range(1, 140), 200, 500])
def test_padding_is_small_and_idempotent(num_rows):
    padded = padded_rows(num_rows)
    assert num_rows <= padded <= num_rows + 8
    assert padded_rows(padded) == padded


# ---- the fp16 product -----------------------------------------------------------------------------------------------


def every_bf16(low, high):
    """Every positive and negative bf16 value in [2^low, 2^high), padded with zeros to a matrix of 64 columns."""
    exponents = torch.arange(low, high, dtype=torch.float64)
    values = torch.exp2(exponents)[:, None] * (1 + torch.arange(128, dtype=torch.float64) / 128)
    values = torch.cat([values.reshape(-1), -values.reshape(-1)])
    weight = values.reshape(-1, 64).to(torch.bfloat16)
    assert torch.equal(weight.double(), values.reshape(-1, 64))
    return weight


def recovered(product, columns):
    """The weight as the product sees it: the product of the identity."""
    return product(torch.eye(columns)).T


@needs_fp16
@pytest.mark.parametrize("low", [-100, -60, -31, -20, -8, 0, 7, 40, 96])
def test_the_fp16_product_is_exact_for_every_bf16_value_in_its_range(low):
    weight = every_bf16(low, low + 31)
    product = fp16_layer(weight, None)
    assert product is not None
    assert torch.equal(recovered(product, 64), weight.float())


@needs_fp16
@pytest.mark.parametrize("low", [-60, -20, 0, 40])
def test_the_fp16_product_refuses_values_that_do_not_fit(low):
    assert fp16_layer(every_bf16(low, low + 40), None) is None
    assert fp16_layer(every_bf16(low, low + 34), None) is None


@needs_fp16
def test_the_fp16_product_keeps_zeros_and_powers_of_two():
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert torch.equal(recovered(fp16_layer(weight, None), 64), weight.float())
    weight[0, 0], weight[1, 1] = 2.0**14, 2.0**-24  # a single bit goes further than eight
    assert torch.equal(recovered(fp16_layer(weight, None), 64), weight.float())


@needs_fp16
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_weights_are_never_served_as_finite(bad):
    weight = torch.ones(8, 64, dtype=torch.bfloat16)
    weight[3, 5] = bad
    product = fp16_layer(weight, None)
    if product is not None:
        assert not product(torch.ones(4, 64))[:, 3].isfinite().any()


@needs_fp16
@pytest.mark.parametrize("exponent", [-110, -112, -113, -114, -120, -126])
def test_the_fp16_product_is_exact_or_refused_for_tiny_weights(exponent):
    weight = torch.full((8, 64), 2.0**exponent, dtype=torch.bfloat16)
    product = fp16_layer(weight, None)
    if product is not None:
        assert torch.equal(recovered(product, 64), weight.float())


# ---- types ----------------------------------------------------------------------------------------------------------


def test_activations_are_fp32_on_a_cpu():
    assert compute_dtype("bfloat16", "cpu") == torch.float32
    assert compute_dtype("float32", "cpu") == torch.float32
    assert compute_dtype("float32", "cuda") == torch.float32
    assert compute_dtype("bfloat16", "cuda") == torch.bfloat16
