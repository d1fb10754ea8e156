"""Rotary position embedding: tables that grow on demand, and the rotation in three passes. Shapes: T rows, N heads, D head size."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Rotary:
    """cos [T, 1, D]; signed_sin [T, 1, D] with its first half negated, so that rotating is x*cos + roll(x, D/2)*signed_sin."""

    cos: torch.Tensor
    signed_sin: torch.Tensor

    @classmethod
    def from_tables(cls, cos: torch.Tensor, sin: torch.Tensor) -> "Rotary":
        """From the usual tables [T, D] of a half-split rotation."""
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)
        return cls(cos[:, None, :], signed[:, None, :])

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N, D], rotated. The result is a tensor of its own: a strided output would change the last bit with T."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.signed_sin)


class RotaryTables:
    """cos and sin by position, from a transformers rotary module (so every kind of `rope_scaling` is that library's)."""

    def __init__(self, module: nn.Module, max_positions: int, dtype: torch.dtype, device: str) -> None:
        self._module = module.to(device)
        self._max_positions = max_positions
        self._dtype = dtype
        self._device = device
        self._cos = self._sin = torch.empty(0)

    def rows(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, D] of `positions` [T], all below `num_positions`."""
        if num_positions > self._cos.shape[0]:
            size = max(num_positions, min(self._max_positions, max(512, 2 * num_positions)))
            probe = torch.empty(1, 1, dtype=self._dtype, device=self._device)
            cos, sin = self._module(probe, torch.arange(size, device=self._device)[None])
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
