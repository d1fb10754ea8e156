"""Counter-based noise inside kernels: the same bits as in torch, on every device.

Uniforms: Philox4x32-10 (Salmon et al., SC 2011), key = the 64-bit seed, counter = (position, stream); the four output words serve
four purposes; a uniform is a word's upper 24 bits times 2⁻²⁴, exact in fp32.
Exponentials, one value per token id: a second stream's words are a key (a, b), which the finaliser of splitmix64 (Stafford's Mix13)
spreads over the ids into a 63-bit odd k, and E = -log(1 - k·2⁻⁶³) in fp64.

Integers are the same everywhere by nature. The logarithm is not: no two libraries round it alike. So it is written here as
additions, multiplications and divisions that IEEE 754 fixes to the last bit (compile with `enable_fp_fusion=False`): E too has the
same bits in torch, in the interpreter and on a GPU. It is within 2⁻⁵⁰ of the exact value, relatively, as is numpy's; so a race
argmax p / E decided with either differs only if its two best ratios agree to some 50 bits.
Seeds and positions are int64 tensors (a seed above 2⁶³ as its two's complement). Nothing is read but what the caller hands in.
"""

import torch

from dflash2_kernels.triton_import import jit, tl

ACCEPT, RESIDUAL, BONUS = 1, 2, 3  # output words of stream 0; word 0 is the drafter's
DRAFT = 0
TOKEN_STREAM = 1
_LOW = 0xFFFFFFFF


def wrapped(constant: int) -> int:
    """The bits of an unsigned 64-bit integer as a signed one."""
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA, _FIRST, _SECOND = (wrapped(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SQRT_HALF = 0.7071067811865476
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # the high part times a small integer is exact
_NUM_TERMS = 11  # of atanh's series: s² ≤ 0.0295, so what is left out is below 2⁻⁵⁶ of the sum


# ---- reference ------------------------------------------------------------------------------------------------------


def words_reference(seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """The four 32-bit words of each (seed, position): int64 [4, …] holding 0 … 2³² - 1."""
    c0, c1 = positions & _LOW, (positions >> 32) & _LOW
    c2, c3 = torch.full_like(positions, stream), torch.zeros_like(positions)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(10):
        high_0, low_0 = _product(c0, 0xD2511F53)
        high_1, low_1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack([c0, c1, c2, c3])


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(upper, lower) 32 bits of a·b; int64 wraps, and its bits are those of the unsigned product."""
    product = a * wrapped(b)
    return (product >> 32) & _LOW, product & _LOW


def uniforms_reference(seeds: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """Uniform draws in [0, 1), fp32, one per (seed, position), for one purpose."""
    return (words_reference(seeds, positions)[purpose] >> 8).float() * 2.0**-24


def exponentials_reference(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """E of ids [n, C] under seeds [n] and positions [n]: fp64 [n, C] > 0."""
    w = words_reference(seeds, positions, TOKEN_STREAM)
    a, b = ((w[0] << 32) | w[1])[:, None], ((w[2] << 32) | w[3])[:, None]
    z = ids * _GAMMA + a
    z = (z ^ shifted(z, 30)) * _FIRST
    z = (z ^ shifted(z, 27) ^ b) * _SECOND
    k = shifted(z ^ shifted(z, 31), 1) | 1
    x = (k.double() * 2.0**-63).clamp_max(1.0 - 2.0**-53)
    rest = 1.0 - x
    bits = rest.view(torch.int64)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).view(torch.float64)  # in [0.5, 1)
    small = mantissa < _SQRT_HALF
    exponent, mantissa = torch.where(small, exponent - 1, exponent), torch.where(small, mantissa * 2.0, mantissa)
    f = torch.where(exponent == 0, -x, mantissa - 1.0)
    s = f / (2.0 + f)
    square = s * s
    series = torch.full_like(s, 1.0 / (2 * _NUM_TERMS + 1))
    for term in range(_NUM_TERMS - 1, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    shift = exponent.double()
    return -(shift * _LN2_HIGH + (shift * _LN2_LOW + (s + s) * series))


def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z >> bits, zeros coming in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# ---- inside kernels -------------------------------------------------------------------------------------------------


@jit
def words(seed, position, STREAM: tl.constexpr):
    """The four words, uint32, of (seed, position), int64 each, of one shape."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    return tl.philox(seed.to(tl.uint64, bitcast=True), low, high, low * 0 + STREAM, low * 0)


@jit
def unit(word):
    """uint32 → fp32 in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def token_key(seed, position):
    """(a, b), uint64: the key of the exponentials of one (seed, position)."""
    w0, w1, w2, w3 = words(seed, position, 1)
    return (w0.to(tl.uint64) << 32) | w1.to(tl.uint64), (w2.to(tl.uint64) << 32) | w3.to(tl.uint64)


@jit
def exponential(a, b, ids):
    """E of ids (int32 or int64) under a key, fp64."""
    z = ids.to(tl.uint64) * 0x9E3779B97F4A7C15 + a
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27) ^ b) * 0x94D049BB133111EB
    k = ((z ^ (z >> 31)) >> 1) | 1
    x = tl.minimum(k.to(tl.int64).to(tl.float64) * 1.0842021724855044e-19, 0.9999999999999999)
    rest = 1.0 - x
    bits = rest.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = mantissa < 0.7071067811865476
    exponent = tl.where(small, exponent - 1, exponent)
    mantissa = tl.where(small, mantissa * 2.0, mantissa)
    f = tl.where(exponent == 0, -x, mantissa - 1.0)
    s = f / (2.0 + f)
    square = s * s
    series = tl.zeros_like(s) + 1.0 / 23
    for term in tl.static_range(10, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    shift = exponent.to(tl.float64)
    return -(shift * 0.6931471803691238 + (shift * 1.9082149292705877e-10 + (s + s) * series))
