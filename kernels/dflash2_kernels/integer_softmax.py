"""A softmax in whole numbers: sums that do not depend on their order, so on no tile, thread or device.

    weight(v) = ⌊exp(l_v / τ - max l / τ) · 2⁴⁴⌋,   probability(v) = weight(v) / Σ weight

The division, and an exponential written as additions and multiplications in fp32 (Cody and Waite's reduction, Taylor terms to
r⁷), are fixed to the bit by IEEE 754 as long as nothing is fused (`enable_fp_fusion=False`); the sums are int64 and exact. So whoever
decides by these weights decides alike everywhere. The exponential's relative error is below 2⁻²², like that of an fp32 softmax, and 2⁻⁴⁴ of
the largest weight is the smallest that counts. The largest is 2⁴⁴ exactly; up to 2¹⁸ ids fit an int64.

*Rank*: one integer per id, which orders a row by logit descending, then id ascending; no two are equal.
"""

import torch

from dflash2_kernels.triton_import import jit, tl

TOP_BITS = 44
LARGEST_VOCAB = 1 << 18
_LOG2_E = 1.4426950216293335
_LN2_HIGH, _LN2_LOW = (
    0.693138122558593750,
    9.05800061445916071534e-06,
)  # the high part has so few bits that n · high is exact
_TERMS = (
    0.00019841270113829523,
    0.0013888889225199819,
    0.008333333767950535,
    0.0416666679084301,
    0.1666666716337204,
    0.5,
    1.0,
    1.0,
)


def weights_reference(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits fp32 [V] and a temperature fp32 [] → (weights, ranks), int64 [V] each."""
    scaled = logits / temperature
    below = scaled - scaled.max()
    reach = below.clamp_min(-40.0)
    n = torch.floor(reach * _LOG2_E + 0.5)
    r = reach - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    y = torch.full_like(r, _TERMS[0])
    for term in _TERMS[1:]:
        y = y * r + term
    power = ((n.to(torch.int32) + (127 + TOP_BITS)) << 23).view(torch.float32)
    ids = torch.arange(logits.shape[0], device=logits.device)
    depth = below.abs().view(torch.int32).to(torch.int64)
    return (y * power).to(torch.int64), ((0x7FFFFFFF - depth) << 31) | (0x7FFFFFFF - ids)


@jit
def depth_below(logit, top, temperature):
    """logit / τ - top / τ, fp32 ≤ 0."""
    return tl.div_rn(logit, temperature) - tl.div_rn(top, temperature)


@jit
def weight(below):
    """`depth_below` → weight, int64."""
    reach = tl.maximum(below, -40.0)
    n = tl.floor(reach * 1.4426950216293335 + 0.5)
    r = reach - n * 0.693138122558593750
    r = r - n * 9.05800061445916071534e-06
    y = r * 0.00019841270113829523 + 0.0013888889225199819
    y = y * r + 0.008333333767950535
    y = y * r + 0.0416666679084301
    y = y * r + 0.1666666716337204
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    power = ((n.to(tl.int32) + 171) << 23).to(tl.float32, bitcast=True)
    return (y * power).to(tl.int64)


@jit
def rank(below, ids):
    """`depth_below` and ids → rank, int64."""
    depth = tl.abs(below).to(tl.int32, bitcast=True)
    return ((0x7FFFFFFF - depth).to(tl.int64) << 31) | (0x7FFFFFFF - ids).to(tl.int64)
