"""What a drafter borrows from its target: the embedding table and the output head. Knows neither model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TargetShare:
    """embedding: raw rows [V_rows, H] (V_rows may exceed the vocabulary by padding). head: [n, H] activations to fp32
    logits [n, vocab_size], padded rows already cut. head_weight: [V_rows, H], to compare with a head that a drafter
    checkpoint ships; None when the head is only reachable through `head`."""

    embedding: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    head_weight: torch.Tensor | None
    vocab_size: int
    hidden_size: int
    num_layers: int
