"""Grouped dynamic causal convolution along a draft block (DFlash 2): both sides of a sub-layer, `prepare` and `finish`.

    y[n, i, ch] = Σ_{t ≤ min(i, T-1)} (base[t, ch] + dynamic[n, i, t, ch // g]) · x[n, i - t, ch]

Taps never cross a block's edge. Accumulated in fp32, stored in the type of x.
Shapes: n blocks, B rows, H channels, G = H / g groups, T taps. Bytes: reads n·B·H + n·B·T·G + T·H values, writes n·B·H.
"""

from collections.abc import Iterator

import torch

from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.published_shapes import BATCHES, CONV_GROUP, CONV_TAPS, DRAFT_BLOCK, HIDDEN
from dflash2_kernels.rounding import rounded
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import ceil_div, jit, tl

OPERATOR = Operator("grouped_conv")
_ROWS = 16  # rows of the flat batch per program: base kernels are read once for all of them
_CHANNELS = 128


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


@jit
def _grouped_conv_kernel(
    x_ptr, dynamic_ptr, base_ptr, y_ptr,
    num_rows, width, channels,
    x_block_stride, x_row_stride, x_channel_stride,
    dynamic_block_stride, dynamic_row_stride, dynamic_tap_stride, dynamic_group_stride,
    base_tap_stride, base_channel_stride,
    TAPS: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS rows of the flat batch [n · B] by CHANNELS channels; a row's place in its block is row % B, so B is free."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < num_rows)[:, None] & (channel < channels)[None, :]
    block, place = row // width, row % width
    x_at = x_ptr + block[:, None] * x_block_stride + channel[None, :] * x_channel_stride
    dynamic_at = dynamic_ptr + (block * dynamic_block_stride + place * dynamic_row_stride)[:, None]
    dynamic_at += (channel // GROUP_SIZE)[None, :] * dynamic_group_stride
    y = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        reaches = inside & (place >= tap)[:, None]
        x = tl.load(x_at + ((place - tap) * x_row_stride)[:, None], mask=reaches, other=0.0).to(tl.float32)
        base = tl.load(
            base_ptr + tap * base_tap_stride + channel * base_channel_stride, mask=channel < channels, other=0.0
        )
        change = tl.load(dynamic_at + tap * dynamic_tap_stride, mask=reaches, other=0.0).to(tl.float32)
        y = tl.where(reaches, y + (base.to(tl.float32)[None, :] + change) * x, y)
    tl.store(y_ptr + row[:, None] * channels + channel[None, :], rounded(y, y_ptr.dtype.element_ty), mask=inside)


def grouped_conv(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The operator: x [n, B, H], dynamic [n, B, T, G], base [T, H] → [n, B, H] in x's dtype, contiguous. Raises ValueError on
    shapes that do not fit."""
    if x.dim() != 3 or dynamic.dim() != 4 or base.dim() != 2:
        raise ValueError(
            f"grouped_conv: expected x [n,B,H], dynamic [n,B,T,G], base [T,H]; got {x.shape}, {dynamic.shape}, {base.shape}"
        )
    if (
        dynamic.shape[:2] != x.shape[:2]
        or base.shape != (dynamic.shape[2], x.shape[2])
        or x.shape[2] % dynamic.shape[3]
    ):
        raise ValueError(f"grouped_conv: shapes do not fit: x {x.shape}, dynamic {dynamic.shape}, base {base.shape}")
    if x.numel() == 0 or not OPERATOR.uses_kernel(x, dynamic, base):
        return grouped_conv_reference(x, dynamic, base)
    num_rows, channels = x.shape[0] * x.shape[1], x.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _grouped_conv_kernel[(ceil_div(num_rows, _ROWS), ceil_div(channels, _CHANNELS))](
        x, dynamic, base, y,
        num_rows, x.shape[1], channels,
        *x.stride(), *dynamic.stride(), *base.stride(),
        TAPS=base.shape[0], GROUP_SIZE=channels // dynamic.shape[3], ROWS=_ROWS, CHANNELS=_CHANNELS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def grouped_conv_traffic(num_blocks: int, width: int, channels: int, groups: int, taps: int, itemsize: int) -> Traffic:
    """Model of one call. A tile reads its base kernels again, and up to T - 1 rows before it that are not its own."""
    rows, tiles = num_blocks * width, ceil_div(num_blocks * width, _ROWS)
    crossing = sum(min(tile * _ROWS % width, taps - 1) for tile in range(1, tiles))
    dynamic = rows * taps * groups * ceil_div(_CHANNELS, channels // groups) * ceil_div(channels, _CHANNELS) // groups
    read = (rows + crossing) * channels + dynamic + tiles * taps * channels
    least = 2 * rows * channels + rows * taps * groups + taps * channels
    return Traffic(read * itemsize, rows * channels * itemsize, least * itemsize, 3 * taps * rows * channels)


def traffic_cases() -> Iterator[TrafficCase]:
    """A draft step of the published drafter, bf16."""
    for batch in BATCHES:
        traffic = grouped_conv_traffic(batch, DRAFT_BLOCK, HIDDEN, HIDDEN // CONV_GROUP, CONV_TAPS, 2)
        yield TrafficCase(OPERATOR.name, f"{batch}×{DRAFT_BLOCK}×{HIDDEN}, {CONV_TAPS} taps, bf16", traffic)


def compile_cases() -> Iterator[CompileCase]:
    """The published drafter's convolution in the types that it runs in."""
    sizes = (
        "num_rows",
        "width",
        "channels",
        "x_block_stride",
        "x_row_stride",
        "dynamic_block_stride",
        "dynamic_row_stride",
    )
    strides = ("dynamic_tap_stride", "base_tap_stride")
    for kind in ("bf16", "fp32"):
        yield CompileCase(
            f"grouped_conv {kind}",
            _grouped_conv_kernel,
            {**dict.fromkeys(("x_ptr", "dynamic_ptr", "base_ptr", "y_ptr"), f"*{kind}"), **dict.fromkeys((*sizes, *strides), "i32")},
            {
                "x_channel_stride": 1, "dynamic_group_stride": 1, "base_channel_stride": 1,
                "TAPS": CONV_TAPS, "GROUP_SIZE": CONV_GROUP, "ROWS": _ROWS, "CHANNELS": _CHANNELS,
            },
            divisible=("channels", "x_block_stride", "x_row_stride", *strides),
        )  # fmt: skip
