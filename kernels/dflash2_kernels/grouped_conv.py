"""Grouped dynamic causal convolution along a draft block (DFlash 2).

    y[n, i, ch] = Σ_{t ≤ min(i, T-1)} (base[t, ch] + dynamic[n, i, t, ch // g]) · x[n, i - t, ch]

Taps never cross a block's edge. Accumulated in fp32, stored in the type of x.
Shapes: n blocks, B rows, H channels, G = H / g groups, T taps. Bytes: reads n·B·H + n·B·T·G + T·H values, writes n·B·H.
"""

import torch


def grouped_conv_reference(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """x [n, B, H], dynamic [n, B, T, G], base [T, H] → [n, B, H], in x's dtype."""
    num_blocks, num_rows, channels = x.shape
    taps, groups = dynamic.shape[2], dynamic.shape[3]
    rows = x.float().reshape(num_blocks, num_rows, groups, channels // groups)
    kernel = base.float().reshape(taps, groups, channels // groups) + dynamic.float()[..., None]  # [n, B, T, G, g]
    y = kernel[:, :, 0] * rows
    for tap in range(1, min(taps, num_rows)):
        y[:, tap:] += kernel[:, tap:, tap] * rows[:, :-tap]
    return y.reshape(num_blocks, num_rows, channels).to(x.dtype)


def grouped_conv(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The operator. Raises ValueError on shapes that do not fit."""
    if x.dim() != 3 or dynamic.dim() != 4 or base.dim() != 2:
        raise ValueError(f"grouped_conv: expected x [n,B,H], dynamic [n,B,T,G], base [T,H]; got {x.shape}, {dynamic.shape}, {base.shape}")
    if dynamic.shape[:2] != x.shape[:2] or base.shape != (dynamic.shape[2], x.shape[2]) or x.shape[2] % dynamic.shape[3]:
        raise ValueError(f"grouped_conv: shapes do not fit: x {x.shape}, dynamic {dynamic.shape}, base {base.shape}")
    return grouped_conv_reference(x, dynamic, base)
