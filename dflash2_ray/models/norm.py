"""Root-mean-square norm. On a CPU `F.rms_norm` is a chain of eight small operators; this one takes five. Shapes: any […, H]."""

import functools

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps), times weight [H] if given, over the last dimension; sums in fp32. Type and shape of x."""
    width = x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, (width,), weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), length, length, value=1 / width).rsqrt_()
    y = x * scale
    return y if weight is None else y.mul_(weight)


@functools.cache
def _constant(value: float) -> torch.Tensor:
    with torch.inference_mode(False):  # one tensor for callers inside and outside of inference mode
        return torch.tensor(value)
