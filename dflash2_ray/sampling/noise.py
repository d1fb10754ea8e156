"""Counter-based noise: every draw is a pure function of (request seed, absolute position, purpose).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the 64-bit seed, the
counter holds the position, and the four output words are the four purposes of that position. So the purposes are
independent, one evaluation serves them all, and a kernel can reproduce it bit for bit. Another *stream* (a third word of the
counter) is independent of these four: `token_noise` takes its keys from one. It must not know batches, steps or the order of
calls. *Position* is the absolute position of the token that the draw decides.
"""

import enum
import functools
from collections.abc import Sequence

import numpy as np
import torch

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
TOKEN_STREAM = 1  # the stream of `token_noise`; 0 holds the four purposes
_FEW = 24  # up to here ten rounds in Python integers beat numpy's cost per call


class Purpose(enum.IntEnum):
    """What a draw is for; the value is the output word."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 on uint64 arrays that hold 32-bit words: counter [4, n], key [2, n] → words [4, n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return np.stack([c0, c1, c2, c3])


@functools.lru_cache(maxsize=4096)
def _few_words(seed: int, position: int, stream: int) -> tuple[int, int, int, int]:
    """The same function on Python integers; drafter and target ask for the same positions, so the last ones are kept."""
    low, multiplier_0, multiplier_1 = 0xFFFFFFFF, 0xD2511F53, 0xCD9E8D57
    c0, c1, c2, c3 = position & low, (position >> 32) & low, stream, 0
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(_ROUNDS):
        product_0, product_1 = multiplier_0 * c0, multiplier_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & low, (product_0 >> 32) ^ c3 ^ k1, product_0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def words(seeds: Sequence[int], positions: Sequence[int], stream: int = 0) -> np.ndarray:
    """The four words of each (seed, position) in one stream: uint64 [4, n] holding 32-bit values. Seeds are taken modulo 2^64."""
    if len(positions) <= _FEW:
        rows = [_few_words(seed, position, stream) for seed, position in zip(seeds, positions, strict=True)]
        return np.array(rows, dtype=np.uint64).reshape(len(rows), 4).T
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack([position & _LOW, position >> _SHIFT, zero + np.uint64(stream), zero])
    return philox(counter, np.stack([seed & _LOW, seed >> _SHIFT]))


def uniforms(seeds: Sequence[int], positions: Sequence[int], purpose: Purpose) -> torch.Tensor:
    """Uniform draws in [0, 1) with 24 bits, fp32 [n], one per (seed, position), for one purpose."""
    return torch.from_numpy(_unit(words(seeds, positions)[purpose]))


def all_uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Uniform draws of all four purposes, fp32 [4, n]."""
    return torch.from_numpy(_unit(words(seeds, positions)))


def _unit(word: np.ndarray) -> np.ndarray:
    return ((word >> np.uint64(8)).astype(np.float32)) * np.float32(2.0**-24)
