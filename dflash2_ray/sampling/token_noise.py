"""Noise with one value per token id: E(seed, position, id), exponential with mean 1, for the matching rule.

argmax over v of p(v) / E(v) is a draw from p: the exponential race, which is Gumbel-max (argmax of log p + G) with
G = -log E. Whoever knows seed and position can ask for any id alone, and gets the bits that a whole row would hold; so a
drafter races its few candidates with the very noise of the target.

One Philox evaluation per (seed, position), in a stream of its own, gives a 128-bit key (a, b). A 64-bit finaliser spreads it
over the ids (constants: Stafford's Mix13, as in splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), b enters in its middle, so that two rows are not one sequence seen from two starts:

    z = a + id·γ;  z = (z ^ z>>30)·m₁;  z = (z ^ z>>27 ^ b)·m₂;  k = ((z ^ z>>31) >> 1) | 1;  E = -log(1 - k·2⁻⁶³) in fp64

k is the same integer on every device; E on CPUs is numpy's log1p, on others torch's. It must not know drafts, options or
batches. Shapes: n rows, one (seed, position) each; V vocabulary; C ids of a row.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from dflash2_kernels.noise import shifted, wrapped
from dflash2_ray.sampling.noise import TOKEN_STREAM, words

_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_SCALE = 2.0**-63
_BELOW_ONE = 1.0 - 2.0**-53
_LONGEST = 44.0  # above every E: -log(2⁻⁵³) is 36.8
_SLACK = 1e-6  # far above the rounding of the fp32 ratios
_TILE = 16384  # values worked on at once: they stay in a core's cache


def exponentials(seeds: Sequence[int], positions: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """E of the given ids [n, C] int64, row i under (seeds[i], positions[i]): fp64 [n, C] > 0 on the device of `ids`."""
    a, b = _keys(seeds, positions)
    if ids.device.type == "cpu":
        return torch.from_numpy(_exponentials(a[:, None], b[:, None], ids.numpy()))
    return _exponentials_torch(_signed(a, ids.device)[:, None], _signed(b, ids.device)[:, None], ids)


def race(probs: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """One draw per row of p: probs fp32 [n, V] ≥ 0 → the ids of argmax p / E (fp64; the lowest among equals).

    A row's draw is a function of the row, its seed and its position only. Never an id of probability zero.
    """
    a, b = _keys(seeds, positions)
    if probs.device.type == "cpu":
        return _race(probs.numpy(), a, b)
    won: list[int] = []
    ids = torch.arange(probs.shape[1], device=probs.device)
    rows_at_once = max(1, (1 << 23) // probs.shape[1])
    for start in range(0, probs.shape[0], rows_at_once):
        part = slice(start, start + rows_at_once)
        own_a, own_b = (_signed(key[part], probs.device)[:, None] for key in (a, b))
        won += (probs[part].double() / _exponentials_torch(own_a, own_b, ids)).argmax(-1).tolist()
    return won


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(a, b), uint64 [n] each."""
    w = words(seeds, positions, TOKEN_STREAM)
    high = np.uint64(32)
    return w[0] << high | w[1], w[2] << high | w[3]


# ---- CPU: numpy, whose integer loops are several times as fast as torch's ---------------------------------------------


def _mix(z: np.ndarray, b: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """z = a + id·γ, uint64, becomes k in place; returned as int64, which converts to floats faster."""
    z ^= np.right_shift(z, np.uint64(30), out=scratch)
    z *= np.uint64(_FIRST)
    z ^= np.right_shift(z, np.uint64(27), out=scratch)
    z ^= b
    z *= np.uint64(_SECOND)
    z ^= np.right_shift(z, np.uint64(31), out=scratch)
    z >>= np.uint64(1)
    z |= np.uint64(1)
    return z.view(np.int64)


def _exponentials(a: np.ndarray, b: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """E, fp64; the keys are broadcast against int64 ids."""
    z = ids.astype(np.uint64) * np.uint64(_GAMMA) + a
    x = _mix(z, b, np.empty_like(z)) * _SCALE
    return -np.log1p(-np.minimum(x, _BELOW_ONE))


@functools.lru_cache(maxsize=4)
def _steps(num_ids: int) -> np.ndarray:
    """id·γ of ids 0 … num_ids - 1."""
    return np.arange(num_ids, dtype=np.uint64) * np.uint64(_GAMMA)


def _race(probs: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[int]:
    """The race without a logarithm per token. x = k·2⁻⁶³ never exceeds E = -log(1 - x), so p / x is never below p / E: only
    tokens whose p / x reaches the p / E of one token can win, and those few race in fp64."""
    num_rows, vocab = probs.shape
    columns = min(vocab, _TILE)
    rows_at_once = max(1, _TILE // vocab)
    won: list[int] = []
    z, scratch = np.empty((2, rows_at_once * columns), dtype=np.uint64)
    ratios = np.empty((rows_at_once, vocab), dtype=np.float32)
    open_rows: list[int] = []
    open_ids: list[np.ndarray] = []
    for start in range(0, num_rows, rows_at_once):
        p = probs[start : start + rows_at_once]
        ratio = ratios[: len(p)]
        own_a, own_b = a[start : start + len(p), None], b[start : start + len(p), None]
        for first in range(0, vocab, columns):
            at = slice(first, min(first + columns, vocab))
            shape = (len(p), at.stop - first)
            tile = z[: shape[0] * shape[1]].reshape(shape)
            np.add(_steps(columns)[: shape[1]], own_a + np.uint64(first * _GAMMA & 0xFFFFFFFFFFFFFFFF), out=tile)
            ratio[:, at] = _mix(tile, own_b, scratch[: tile.size].reshape(shape))
            ratio[:, at] *= np.float32(_SCALE)
            np.divide(p[:, at], ratio[:, at], out=ratio[:, at])
        best = ratio.argmax(-1)
        for row, winner in enumerate(best.tolist()):
            alive = np.flatnonzero(ratio[row] >= _surely(float(p[row, winner]), float(ratio[row, winner])))
            if len(alive) > 1:
                open_rows.append(start + row)
                open_ids.append(alive)
            won.append(winner)
    if open_rows:
        _decide(probs, a, b, open_rows, open_ids, won)
    return won


def _surely(p: float, ratio: float) -> np.float32:
    """A lower bound of p / E for the token whose fp32 p / x is `ratio`, less some slack."""
    x = p / ratio * (1 + _SLACK) if ratio > 0 else 1.0
    longest = -math.log1p(-x) if x < 1 else _LONGEST
    return np.float32(p / longest * (1 - _SLACK))


def _decide(
    probs: np.ndarray, a: np.ndarray, b: np.ndarray, rows: Sequence[int], ids: Sequence[np.ndarray], won: list[int]
) -> None:
    """Race the ids that are left of the given rows, ascending, and put the winners into `won`."""
    row = np.repeat(rows, [len(one) for one in ids])
    flat = np.concatenate(ids)
    values = probs[row, flat].astype(np.float64) / _exponentials(a[row], b[row], flat)
    offset = 0
    for r, own in zip(rows, ids, strict=True):
        won[r] = int(own[values[offset : offset + len(own)].argmax()])
        offset += len(own)


# ---- other devices: torch, int64 that wraps ---------------------------------------------------------------------------


def _signed(key: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(key.view(np.int64)).to(device)


def _exponentials_torch(a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    z = ids * wrapped(_GAMMA) + a
    z = (z ^ shifted(z, 30)) * wrapped(_FIRST)
    z = (z ^ shifted(z, 27) ^ b) * wrapped(_SECOND)
    x = (shifted(z ^ shifted(z, 31), 1) | 1).double() * _SCALE
    return -torch.log1p(-x.clamp_max(_BELOW_ONE))
