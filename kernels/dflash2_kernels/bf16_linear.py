"""A linear layer with bf16 weights for few rows on a CPU with AVX512-bf16, one thread.

    y = bf16(x) · wᵀ + bias, summed in fp32, over k in pairs, in one order for any number of rows

Weights are kept in the order in which they are read: groups of four vectors of 16 outputs, in each group pair of inputs by pair,
[group][K/2][vector][16][2], so the product is one stream through huge pages; the last group may be narrower, outputs are padded
to 16 and inputs to 2 with zeros. Shapes: x [T, K] fp32, weight [N, K] bf16, bias [N] fp32, y [T, N] fp32. Bytes: reads the weights once
per 96 rows.
"""

import ctypes
import functools
from typing import Any

import torch
from torch.nn import functional as F

from dflash2_kernels import huge_pages
from dflash2_kernels.native import library

_LANES = 16
_GROUP = 4


def available() -> bool:
    """Whether this machine can run it."""
    return library() is not None


def bf16_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] → [T, N] fp32."""
    return F.linear(x.to(torch.bfloat16).float(), weight.float(), bias)


class Bf16Linear:
    """A packed weight. Raises ValueError on what is not bf16 [N, K] on a CPU, RuntimeError where `available()` is false."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.device.type != "cpu":
            raise ValueError(
                f"bf16_linear: expected a bf16 weight [N, K] on a CPU, got {weight.dtype} {tuple(weight.shape)} on {weight.device}"
            )
        self._function = _function()
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = _pack(weight)
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] fp32 → [T, N]. Raises ValueError."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.num_inputs:
            raise ValueError(f"bf16_linear: expected x [T, {self.num_inputs}] fp32, got {tuple(x.shape)} {x.dtype}")
        x = x.contiguous()
        y = torch.empty(x.shape[0], self.num_outputs)
        bias = None if self._bias is None else self._bias.data_ptr()
        weight = self._weight.data_ptr()
        if self._function(x.data_ptr(), x.shape[0], weight, bias, y.data_ptr(), self.num_outputs, self.num_inputs):
            raise MemoryError("bf16_linear: no memory for its inputs")
        return y


@functools.cache
def _function() -> Any:
    found = library()
    if found is None:
        raise RuntimeError("bf16_linear: this machine cannot run it")
    function = found.bf16_linear
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, number, pointer, pointer, pointer, number, number]
    function.restype = ctypes.c_int
    return function


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] → flat, in the order above."""
    num_outputs, num_inputs = weight.shape
    padded = F.pad(weight, (0, num_inputs % 2, 0, -num_outputs % _LANES))
    pairs = padded.shape[1] // 2
    vectors = padded.view(-1, _LANES, pairs, 2)
    whole = vectors.shape[0] // _GROUP * _GROUP
    packed = huge_pages.empty(padded.numel(), torch.bfloat16)
    split = whole * _LANES * pairs * 2
    groups = packed[:split].view(-1, pairs, _GROUP, _LANES, 2)
    groups.copy_(vectors[:whole].view(-1, _GROUP, _LANES, pairs, 2).permute(0, 3, 1, 2, 4))
    packed[split:].view(pairs, -1, _LANES, 2).copy_(vectors[whole:].permute(2, 0, 1, 3))
    return packed
