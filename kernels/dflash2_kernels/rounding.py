"""Storing fp32 as what a tensor holds, rounded to nearest even, as torch does.

Triton 3.9's interpreter cuts the lower half off when it makes bf16 of fp32, where GPUs round; there the half is rounded by hand first.
"""

from dflash2_kernels.triton_import import INTERPRETED, jit, tl

_BY_HAND = tl.constexpr(INTERPRETED)


@jit
def rounded(value, dtype: tl.constexpr):
    """fp32 → dtype (bf16, fp16 or fp32), for use inside kernels."""
    if _BY_HAND and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), value)
    return value.to(dtype)
