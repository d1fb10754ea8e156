"""Writes new key and value rows into pages.

    cache[slots[t]] = kv[t]     for every t whose slot is inside the cache

A padding row has slot -1 and is neither read nor written; so is one whose slot lies behind the cache. Copies bits, converts nothing.
Torch's `index_copy_` has no rows to leave out, so a padded batch of a CUDA graph would need a page to throw rows away into.
Shapes: T rows of the flat batch, K KV heads, D head size. Bytes: reads T·2·K·D values and T slots, writes T·2·K·D values.
"""

from collections.abc import Iterator

import torch

from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.published_shapes import BATCHES, DRAFT_BLOCK, HEAD_DIM, NUM_KV_HEADS
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import ceil_div, jit, tl

OPERATOR = Operator("kv_store")
_VALUES = 1024  # per program


def kv_store_reference(kv: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """kv [T, 2, K, D], slots [T] int64, into cache [slots, 2, K, D]."""
    real = (slots >= 0) & (slots < cache.shape[0])
    cache.index_copy_(0, slots[real], kv[real])


@jit
def _kv_store_kernel(
    kv_ptr, slots_ptr, cache_ptr,
    num_slots, width, head_dim, kv_heads,
    kv_row_stride, kv_kind_stride, kv_head_stride,
    cache_slot_stride, cache_kind_stride, cache_head_stride,
    VALUES: tl.constexpr,
):  # fmt: skip
    """VALUES of the 2·K·D values of one row: program (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if (slot < 0) | (slot >= num_slots):
        return
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    inside = value < width
    dim, head = value % head_dim, value // head_dim
    kind, head = head // kv_heads, head % kv_heads
    own = tl.load(kv_ptr + row * kv_row_stride + kind * kv_kind_stride + head * kv_head_stride + dim, mask=inside)
    tl.store(
        cache_ptr + slot * cache_slot_stride + kind * cache_kind_stride + head * cache_head_stride + dim,
        own,
        mask=inside,
    )


def kv_store(kv: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """The operator: kv [T, 2, K, D], slots [T] int64 (-1: padding), written into cache [slots, 2, K, D] in place. Slots must differ.
    The last dimensions must be contiguous. Raises ValueError on shapes or types that do not fit."""
    if (
        kv.dim() != 4
        or cache.dim() != 4
        or kv.shape[1] != 2
        or kv.shape[1:] != cache.shape[1:]
        or slots.shape != kv.shape[:1]
    ):
        raise ValueError(
            f"kv_store: expected kv [T, 2, K, D], slots [T] and cache [slots, 2, K, D], got {tuple(kv.shape)}, {tuple(slots.shape)} "
            f"and {tuple(cache.shape)}"
        )
    if kv.dtype != cache.dtype or slots.dtype != torch.int64:
        raise ValueError(
            f"kv_store: expected one type and int64 slots, got kv {kv.dtype}, cache {cache.dtype} and slots {slots.dtype}"
        )
    if kv.stride(3) != 1 or cache.stride(3) != 1:
        raise ValueError("kv_store: expected contiguous heads")
    if not OPERATOR.uses_kernel(kv, slots, cache):
        kv_store_reference(kv, slots, cache)
        return
    if kv.numel() == 0:
        return
    kv_heads, head_dim = kv.shape[2:]
    width = 2 * kv_heads * head_dim
    _kv_store_kernel[(kv.shape[0], ceil_div(width, _VALUES))](
        kv,
        slots,
        cache,
        cache.shape[0],
        width,
        head_dim,
        kv_heads,
        *kv.stride()[:3],
        *cache.stride()[:3],
        VALUES=_VALUES,
        num_warps=4,
    )


def kv_store_traffic(num_rows: int, kv_heads: int, head_dim: int, itemsize: int) -> Traffic:
    """Model of one call: every part of a row reads the row's slot."""
    values = num_rows * 2 * kv_heads * head_dim * itemsize
    parts = ceil_div(2 * kv_heads * head_dim, _VALUES)
    return Traffic(values + num_rows * parts * 8, values, 2 * values + num_rows * 8, 0)


def traffic_cases() -> Iterator[TrafficCase]:
    """A verification step of the published target, one layer, bf16."""
    for batch in BATCHES:
        rows = batch * DRAFT_BLOCK
        yield TrafficCase(
            OPERATOR.name,
            f"{rows} rows of 2×{NUM_KV_HEADS}×{HEAD_DIM}, bf16",
            kv_store_traffic(rows, NUM_KV_HEADS, HEAD_DIM, 2),
        )


def compile_cases() -> Iterator[CompileCase]:
    """The published target."""
    strides = (
        "kv_row_stride",
        "kv_kind_stride",
        "kv_head_stride",
        "cache_slot_stride",
        "cache_kind_stride",
        "cache_head_stride",
    )
    for kind in ("bf16", "fp32"):
        yield CompileCase(
            f"kv_store {kind}", _kv_store_kernel,
            {
                "kv_ptr": f"*{kind}", "slots_ptr": "*i64", "cache_ptr": f"*{kind}",
                **dict.fromkeys(("num_slots", "width", "head_dim", "kv_heads", *strides), "i32"),
            },
            {"VALUES": _VALUES}, divisible=("width", "head_dim", *strides),
        )  # fmt: skip
