"""Residual addition and the root-mean-square norm behind it, in one pass over the rows.

    total = x + residual, rounded to their type;   y = total / sqrt(mean(total²) + eps) · weight

Sums in fp32, y is rounded once. Shapes: x and residual any […, H] of one type, weight [H]. Bytes: reads x, residual and weight, writes
total and y: 4·N·H + H values for N rows, where two operators would move 5·N·H + H.
"""

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from dflash2_kernels import row_passes
from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.published_shapes import BATCHES, DRAFT_BLOCK, HIDDEN
from dflash2_kernels.rounding import rounded
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import ceil_div, jit, next_power_of_2, tl

OPERATOR = Operator("add_rms_norm")
_ROWS = 2  # rows per program: they share one reading of the weight
_WIDEST = 8192  # values of a row that a program's registers hold; twice as many spill on sm_80 and sm_90
_NUM_WARPS = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps), times weight [H] if given, over the last dimension; sums in fp32. Type and shape of x. On a CPU
    `F.rms_norm` is a chain of eight small operators; this is one call where `row_passes` runs, or takes five."""
    width = x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, (width,), weight, eps)
    if row_passes.available():
        return row_passes.rms_norm(x, weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), length, length, value=1 / width).rsqrt_()
    y = x * scale
    return y if weight is None else y.mul_(weight)


@functools.cache
def _constant(value: float) -> torch.Tensor:
    with torch.inference_mode(False):  # one tensor for callers inside and outside of inference mode
        return torch.tensor(value)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual […, H], weight [H] → (y, total) in their type."""
    total = x + residual
    return rms_norm(total, weight, eps), total


@jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    num_rows, width, eps, x_row_stride, residual_row_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows; WIDTH is the row's width, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row_stride + column[None, :], mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row[:, None] * residual_row_stride + column[None, :], mask=inside, other=0.0)
    stored = rounded(x.to(tl.float32) + residual.to(tl.float32), total_ptr.dtype.element_ty)
    at = row[:, None] * width + column[None, :]
    tl.store(total_ptr + at, stored, mask=inside)
    total = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(total * total, 1) / width + eps)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, rounded(total * scale[:, None] * weight[None, :], y_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator: x, residual […, H], weight [H] → (y, total) in their type. Raises ValueError on what does not fit."""
    if x.shape != residual.shape or x.dtype != residual.dtype or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"add_rms_norm: expected x and residual of one shape […, H] and type, weight [H]; "
            f"got {x.shape} {x.dtype}, {residual.shape} {residual.dtype}, {weight.shape}"
        )
    width = x.shape[-1]
    fits = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and 0 < width <= _WIDEST
    if x.numel() == 0 or not fits or not OPERATOR.uses_kernel(x, residual, weight):
        return add_rms_norm_reference(x, residual, weight, eps)
    rows, others = (one.reshape(-1, width) for one in (x, residual))
    if rows.stride(1) != 1 and width > 1:
        rows = rows.contiguous()
    if others.stride(1) != 1 and width > 1:
        others = others.contiguous()
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _add_rms_norm_kernel[(ceil_div(rows.shape[0], _ROWS),)](
        rows, others, weight.contiguous(), y, total,
        rows.shape[0], width, eps, rows.stride(0), others.stride(0),
        ROWS=_ROWS, WIDTH=next_power_of_2(width), num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return y, total


def add_rms_norm_traffic(num_rows: int, width: int, itemsize: int) -> Traffic:
    """Model of one call: every program reads the weight."""
    programs = ceil_div(num_rows, _ROWS)
    least = 4 * num_rows * width + width
    read = 2 * num_rows * width + programs * width
    return Traffic(read * itemsize, 2 * num_rows * width * itemsize, least * itemsize, 5 * num_rows * width)


def traffic_cases() -> Iterator[TrafficCase]:
    """A layer's norm in a draft or verify step, bf16."""
    for batch in BATCHES:
        rows = batch * DRAFT_BLOCK
        yield TrafficCase(OPERATOR.name, f"{rows}×{HIDDEN}, bf16", add_rms_norm_traffic(rows, HIDDEN, 2))


def compile_cases() -> Iterator[CompileCase]:
    """Widths of published models, and the widest row."""
    for kind, width in (("bf16", HIDDEN), ("fp32", HIDDEN), ("bf16", 5120), ("fp32", _WIDEST)):
        yield CompileCase(
            f"add_rms_norm {kind} {width}",
            _add_rms_norm_kernel,
            {
                **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr"), f"*{kind}"),
                "num_rows": "i32", "width": "i32", "eps": "fp32", "x_row_stride": "i32", "residual_row_stride": "i32",
            },
            {"ROWS": _ROWS, "WIDTH": next_power_of_2(width)},
            num_warps=_NUM_WARPS,
            divisible=("width", "x_row_stride", "residual_row_stride"),
        )  # fmt: skip
