"""Noise inside kernels has the bits of its reference: words, uniforms and exponentials."""

import torch

from dflash2_kernels.noise import (
    TOKEN_STREAM,
    exponential,
    exponentials_reference,
    token_key,
    uniforms_reference,
    unit,
    words,
    words_reference,
)
from dflash2_kernels.triton_import import jit, tl

SEEDS = [0, 1, 2**32 - 1, 2**32, -1, -(2**63), 0x0123456789ABCDEF, 7]
POSITIONS = [0, 1, 2**32 - 1, 2**32, 2**40 + 5, 12, 3, 99]


@jit
def _write_noise(
    seed_ptr,
    position_ptr,
    ids_ptr,
    words_ptr,
    units_ptr,
    exponentials_ptr,
    STREAM: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.arange(0, N)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    w0, w1, w2, w3 = words(seed, position, STREAM)
    tl.store(words_ptr + row, w0.to(tl.int64))
    tl.store(words_ptr + N + row, w1.to(tl.int64))
    tl.store(words_ptr + 2 * N + row, w2.to(tl.int64))
    tl.store(words_ptr + 3 * N + row, w3.to(tl.int64))
    tl.store(units_ptr + row, unit(w2))
    a, b = token_key(seed, position)
    at = row[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(exponentials_ptr + at, exponential(a[:, None], b[:, None], tl.load(ids_ptr + at)))


def written(seeds, positions, ids, stream, device):
    seeds, positions = (torch.tensor(one, dtype=torch.int64, device=device) for one in (seeds, positions))
    ids = ids.to(device)
    bits = torch.empty(4, len(seeds), dtype=torch.int64, device=device)
    units = torch.empty(len(seeds), device=device)
    exponentials = torch.empty(ids.shape, dtype=torch.float64, device=device)
    _write_noise[(1,)](
        seeds, positions, ids, bits, units, exponentials, stream, len(seeds), ids.shape[1], enable_fp_fusion=False
    )
    return seeds, positions, ids, bits, units, exponentials


def test_bits_are_those_of_the_reference(device):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2**31, (8, 1024), generator=generator)
    ids[:, :3] = torch.tensor([0, 1, 151935])
    for stream in (0, TOKEN_STREAM):
        seeds, positions, ids, bits, units, exponentials = written(SEEDS, POSITIONS, ids, stream, device)
        assert torch.equal(bits, words_reference(seeds, positions, stream))
        assert torch.equal(exponentials, exponentials_reference(seeds, positions, ids))
        if stream == 0:
            assert torch.equal(units, uniforms_reference(seeds, positions, 2))
