"""Linear layers for serving: weights reordered once, and bit-equal rows for any number of rows in the batch.

Four back ends, chosen when a weight is packed, by what the machine can do:

* `avx512_bf16`  bf16 weights in the order of `dflash2_kernels.bf16_linear`, where that can be compiled and one thread computes: three
             times as fast as oneDNN's product at few rows. Rounds its input to bf16, sums in fp32.
* `onednn`   weights in oneDNN's own order (fp32; bf16 on CPUs with native bf16): two to three times faster than the plain
             product at few rows. Private torch operators, so each pack is compared with the plain product first. The bf16
             product rounds its input and output to bf16, sums in fp32, and is fastest at four rows: fewer are padded.
* `fp16`     bf16 weights on a CPU without native bf16: FBGEMM's fp16-stored weights with fp32 activations and accumulation.
             A bf16 value has 8 significant bits and fits fp16's 11 exactly once the matrix is scaled by a power of two;
             where it does not (values spread over more than 2^31) the matrix is kept in fp32. Stock bf16 products cost
             time in proportion to the rows there, this one reads half the bytes of fp32.
* `plain`    `F.linear`, on GPUs and wherever nothing better is proven; never fewer than two rows on a CPU.

On a CPU activations are fp32 whatever the weights are: norms, rotary and attention cost less than in bf16 there, and lose less.

Products of one row, and in FBGEMM row counts that leave a remainder of one or two, run other inner loops and differ in the last
bit; `padded_rows` names the next count that does not. It must not know models. Shapes: T rows.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from dflash2_kernels import bf16_linear

logger = logging.getLogger(__name__)
_FAST_BF16_ROWS = 4
_FP16_LARGEST_EXPONENT = 14  # the largest weight is scaled to [2^14, 2^15)


@functools.cache
def has_native_bf16() -> bool:
    """Whether this CPU multiplies bf16 without converting (avx512_bf16, amx …), as oneDNN sees it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(dtype: str, device: str) -> torch.dtype:
    """Type of activations: fp32 on a CPU, where bf16 is a type of weights (and of a product's input and output)."""
    return torch.bfloat16 if dtype == "bfloat16" and device != "cpu" else torch.float32


class PackedLinear(nn.Module):
    """`y = x @ weight.T + bias` with weight [out, in] packed once. forward: x [T, in] → [T, out], type of activations.

    The weight may be given in bf16 or fp32; activations are of `compute_dtype`. `backend` says what serves it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.backend, self._product = _pack(weight, bias)

    def forward(self, x: torch.Tensor, native: bool = False) -> torch.Tensor:
        """`native`: leave the result in the type that the product writes (bf16 for native bf16 products)."""
        return self._product(x, native)


def stacked(
    weights: Mapping[str, torch.Tensor], prefix: str, names: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several linears under `prefix` as one: [sum of outs, in], and [sum of outs] or None; a linear
    without a bias beside others with one gets zeros."""
    parts = [weights[f"{prefix}.{name}.weight"] for name in names]
    biases = [weights.get(f"{prefix}.{name}.bias") for name in names]
    if all(bias is None for bias in biases):
        return torch.cat(parts), None
    filled = [part.new_zeros(part.shape[0]) if bias is None else bias for part, bias in zip(parts, biases, strict=True)]
    return torch.cat(parts), torch.cat(filled)


def _pack(weight, bias):  # type: ignore[no-untyped-def]
    if weight.device.type != "cpu":
        bias = None if bias is None else bias.to(weight.dtype)
        return "plain", lambda x, native: F.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    if (
        weight.dtype == torch.bfloat16
        and weight.numel() > 0
        and bf16_linear.available()
        and torch.get_num_threads() == 1
    ):
        packed = bf16_linear.Bf16Linear(weight, bias)
        return "avx512_bf16", lambda x, native: packed(x)
    if weight.dtype == torch.bfloat16:
        product = _onednn_bf16_product(weight, bias) if has_native_bf16() else _fp16_product(weight, bias)
        if product is not None:
            return ("onednn" if has_native_bf16() else "fp16"), product
    weight = weight.float()
    product = _onednn_product(weight, bias)
    if product is not None:
        return "onednn", product
    return "plain", lambda x, native: F.linear(_at_least(x, 2), weight, bias)[: x.shape[0]]


def fast_rows(dtype: str, device: str, num_rows: int) -> int:
    """Rows that a whole pass of `num_rows` should be padded to once, so that no product pads them again, and so that passes have few
    sizes: oneDNN compiles and keeps a product for each (0.6 ms and 0.6 MiB per matrix shape)."""
    if device != "cpu":
        return num_rows
    num_rows = _few_sizes(num_rows)
    if dtype == "float32":
        return max(2, num_rows)
    return max(_FAST_BF16_ROWS, num_rows) if has_native_bf16() else padded_rows(num_rows)


def _few_sizes(num_rows: int) -> int:
    """The next of 1 … 16, then multiples of 8 up to 128, then multiples of 32."""
    step = 1 if num_rows <= 16 else 8 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


def _at_least(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [T, n] with zero rows behind it up to num_rows."""
    return x if x.shape[0] >= num_rows else F.pad(x, (0, 0, 0, num_rows - x.shape[0]))


def _onednn_product(weight, bias):  # type: ignore[no-untyped-def]
    """The fp32 product over a oneDNN-ordered copy; None when this build has none, or when it disagrees with `F.linear`."""
    operator = _onednn_operator(weight, 1e-4)
    if operator is None:
        return None
    return lambda x, native: operator(_at_least(x, max(2, _few_sizes(x.shape[0]))), bias)[: x.shape[0]]


def _onednn_bf16_product(weight, bias):  # type: ignore[no-untyped-def]
    """The bf16 product for fp32 activations; None as above."""
    operator = _onednn_operator(weight, 2e-2)
    if operator is None:
        return None

    def product(x: torch.Tensor, native: bool) -> torch.Tensor:
        y = operator(_at_least(x.to(torch.bfloat16), max(_FAST_BF16_ROWS, _few_sizes(x.shape[0]))), None)[: x.shape[0]]
        if bias is not None:
            return y.float().add_(bias)
        return y if native else y.float()

    return product


def _onednn_operator(weight, tolerance):  # type: ignore[no-untyped-def]
    """(x, bias) → product over the packed weight, proven against `F.linear`; None where it is missing or wrong."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        operator = torch.ops.mkldnn._linear_pointwise.default
        probe = torch.linspace(-1, 1, 3 * weight.shape[1], dtype=weight.dtype).reshape(3, -1)
        got = operator(probe, packed, None, "none", [], "").float()
        expected = F.linear(probe.float(), weight.float())
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.debug("oneDNN reordering is not available: %s", error)
        return None
    if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * max(1.0, expected.abs().max().item())):
        logger.warning("the oneDNN-ordered product disagrees with the plain one; using the plain one")
        return None
    return lambda x, bias: operator(x, packed, bias, "none", [], "")


def _fp16_product(weight, bias):  # type: ignore[no-untyped-def]
    """The product over FBGEMM's fp16-stored weights, exact for every bf16 weight; None where it is not."""
    exact = weight.float()
    largest = exact.abs().max().item()
    if not math.isfinite(largest):
        return None
    exponent = _FP16_LARGEST_EXPONENT - math.floor(math.log2(largest)) if largest > 0 else 0
    scaled = torch.ldexp(exact, torch.tensor(exponent))
    if not torch.equal(scaled.half().float(), scaled):
        logger.debug("a weight of shape %s does not fit fp16 exactly; kept in fp32", tuple(weight.shape))
        return None
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        operator = torch.ops.quantized.linear_dynamic_fp16.default
        operator(torch.zeros(4, weight.shape[1]), packed)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.debug("FBGEMM's fp16 product is not available: %s", error)
        return None
    back = 2.0**-exponent
    bias = None if bias is None else bias.float()

    def product(x: torch.Tensor, native: bool) -> torch.Tensor:
        num_rows = x.shape[0]
        y = operator(_at_least(x, padded_rows(num_rows)), packed)[:num_rows].mul_(back)
        return y if bias is None else y.add_(bias)

    return product


@functools.cache
def _stable_fp16_rows() -> frozenset[int]:
    """Row counts 1 … 128 for which FBGEMM's rows equal those of a 48-row product bit for bit (48 = whole tiles of six)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 768, generator=generator)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    x = torch.randn(128, 768, generator=generator)
    whole = torch.cat([torch.ops.quantized.linear_dynamic_fp16(x[i : i + 48].contiguous(), packed) for i in (0, 48)])
    whole = torch.cat([whole, torch.ops.quantized.linear_dynamic_fp16(x[80:].contiguous(), packed)[16:]])
    return frozenset(
        n
        for n in range(1, 129)
        if torch.equal(torch.ops.quantized.linear_dynamic_fp16(x[:n].contiguous(), packed), whole[:n])
    )


@functools.cache
def padded_rows(num_rows: int) -> int:
    """The smallest count from `num_rows` on at which FBGEMM's rows do not depend on how many there are."""
    if num_rows > 128:  # whole tiles of six behind the proven range
        return -(-num_rows // 6) * 6
    return next((n for n in range(num_rows, 129) if n in _stable_fp16_rows()), 132)
