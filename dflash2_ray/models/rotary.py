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


class PlainRotary(nn.Module):
    """A rotary module of the whole head whose frequencies do not follow the length: inv_freq [D/2] fp32, factor on cos and sin.

    It gives what transformers' modules give, bit for bit. Those live beside whole models, whose import takes a drafter longer than
    all the rest of its start.
    """

    def __init__(self, inv_freq: torch.Tensor, factor: float = 1.0) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.factor = factor

    @classmethod
    def of_base(cls, base: float, head_dim: int) -> "PlainRotary":
        """The unscaled frequencies base^(-2i/D) of RoFormer (arXiv 2104.09864, section 3.2.2)."""
        return cls(1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [1, T] → cos and sin [1, T, D] in the type of `like`."""
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat([angles, angles], dim=-1)
        return (both.cos() * self.factor).to(like.dtype), (both.sin() * self.factor).to(like.dtype)


class RotaryTables:
    """cos and sin by position, from a rotary module: of a target's own model (so every kind of `rope_scaling` is transformers'), or
    a drafter's `PlainRotary`."""

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
