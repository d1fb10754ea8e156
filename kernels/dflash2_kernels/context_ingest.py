"""Context rows become the drafter's keys and values: norm, one product for all layers, then one kernel that norms the keys, rotates them
and stores both into pages.

    c = rms_norm(rows, norm)          kv = c · projectionᵀ + bias          (torch: its norm and its matrix product)
    key[n, l, h] = rotate(rms_norm(kv[n, l, 0, h], key_norm[l]), cos[n], sin[n])         value[n, l, h] = kv[n, l, 1, h] · value_scale
    cache[slots[n], l] = (key, value)                                     for every n whose slot is inside the cache

rotate(x) = x · cos + (-x₂, x₁) · sin for the halves x₁, x₂ of a head. Behind the product everything is fp32 and rounded once. A padding
row has slot -1: the kernel neither reads nor writes anything of it.
Shapes: n rows, H hidden, L layers, K KV heads, D head size.
Bytes of the kernel: reads n·L·2·K·D + 2·n·D + L·D values and n slots, writes n·L·2·K·D values. The product reads L·2·K·D·H weights.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.published_shapes import BATCHES, DRAFT_BLOCK, DRAFTER_LAYERS, HEAD_DIM, NUM_KV_HEADS
from dflash2_kernels.rounding import rounded
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import jit, next_power_of_2, tl

OPERATOR = Operator("context_ingest")


def store_context_reference(
    kv: torch.Tensor,
    key_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    eps: float,
    value_scale: float,
) -> None:
    """Arguments as `store_context`."""
    real = (slots >= 0) & (slots < cache.shape[0])
    keys, values = kv[real].float().unbind(2)
    keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps) * key_norm.float()[:, None]
    first, second = keys.chunk(2, dim=-1)
    cos, sin = cos[real].float()[:, None, None], sin[real].float()[:, None, None]
    keys = keys * cos + torch.cat([-second, first], dim=-1) * sin
    cache.index_copy_(0, slots[real], torch.stack([keys, values * value_scale], dim=2).to(cache.dtype))


@jit
def _store_context_kernel(
    kv_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr,
    num_slots, eps, value_scale,
    kv_row_stride, kv_layer_stride, kv_kind_stride, kv_head_stride, norm_stride, cos_stride, sin_stride,
    cache_slot_stride, cache_layer_stride, cache_kind_stride, cache_head_stride,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one row in one layer: program (row, layer). A head lies in two halves of HALF values, as it is rotated."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if (slot < 0) | (slot >= num_slots):
        return
    head, dim = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    own = dim < HALF
    inside = (head < KV_HEADS)[:, None] & own[None, :]
    kv_at = kv_ptr + row * kv_row_stride + layer * kv_layer_stride + head[:, None] * kv_head_stride + dim[None, :]
    cache_at = (
        cache_ptr
        + slot * cache_slot_stride
        + layer * cache_layer_stride
        + head[:, None] * cache_head_stride
        + dim[None, :]
    )
    first = tl.load(kv_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(kv_at + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF) + eps)[:, None]
    norm_at, cos_at, sin_at = (
        norm_ptr + layer * norm_stride + dim,
        cos_ptr + row * cos_stride + dim,
        sin_ptr + row * sin_stride + dim,
    )
    first = first * scale * tl.load(norm_at, mask=own, other=0.0).to(tl.float32)[None, :]
    second = second * scale * tl.load(norm_at + HALF, mask=own, other=0.0).to(tl.float32)[None, :]
    cos_1, cos_2 = (
        tl.load(cos_at, mask=own, other=0.0).to(tl.float32),
        tl.load(cos_at + HALF, mask=own, other=0.0).to(tl.float32),
    )
    sin_1, sin_2 = (
        tl.load(sin_at, mask=own, other=0.0).to(tl.float32),
        tl.load(sin_at + HALF, mask=own, other=0.0).to(tl.float32),
    )
    kind = cache_ptr.dtype.element_ty
    tl.store(cache_at, rounded(first * cos_1[None, :] - second * sin_1[None, :], kind), mask=inside)
    tl.store(cache_at + HALF, rounded(second * cos_2[None, :] + first * sin_2[None, :], kind), mask=inside)
    for half in tl.static_range(2):
        value = tl.load(kv_at + kv_kind_stride + half * HALF, mask=inside, other=0.0).to(tl.float32) * value_scale
        tl.store(cache_at + cache_kind_stride + half * HALF, rounded(value, kind), mask=inside)


def store_context(
    kv: torch.Tensor,
    key_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
    value_scale: float = 1.0,
) -> None:
    """The epilogue alone: kv [n, L, 2, K, D] as the product gives it, key_norm [L, D], cos and sin [n, D] of a half-split rotation, slots
    [n] int64 (-1: padding), written into cache [slots, L, 2, K, D] in place. Slots must differ. The last dimensions must be contiguous.
    Raises ValueError on shapes or types that do not fit."""
    if (
        kv.dim() != 5
        or kv.shape[2] != 2
        or kv.shape[1:] != cache.shape[1:]
        or slots.shape != kv.shape[:1]
        or kv.shape[4] % 2
    ):
        raise ValueError(
            f"context_ingest: expected kv [n, L, 2, K, D] of even D, slots [n] and cache [slots, L, 2, K, D], got {tuple(kv.shape)}, "
            f"{tuple(slots.shape)} and {tuple(cache.shape)}"
        )
    num_rows, num_layers, _, kv_heads, head_dim = kv.shape
    if key_norm.shape != (num_layers, head_dim) or cos.shape != (num_rows, head_dim) or sin.shape != cos.shape:
        raise ValueError(
            f"context_ingest: expected key_norm {(num_layers, head_dim)} and tables {(num_rows, head_dim)}, got {tuple(key_norm.shape)}, "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if slots.dtype != torch.int64:
        raise ValueError(f"context_ingest: expected int64 slots, got {slots.dtype}")
    if any(one.stride(-1) != 1 for one in (kv, key_norm, cos, sin, cache)):
        raise ValueError("context_ingest: expected contiguous heads")
    if not OPERATOR.uses_kernel(kv, key_norm, cos, sin, slots, cache):
        store_context_reference(kv, key_norm, cos, sin, slots, cache, eps, value_scale)
        return
    if kv.numel() == 0:
        return
    _store_context_kernel[(num_rows, num_layers)](
        kv, key_norm, cos, sin, slots, cache, cache.shape[0], eps, value_scale,
        *kv.stride()[:4], key_norm.stride(0), cos.stride(0), sin.stride(0), *cache.stride()[:4],
        KV_HEADS=kv_heads, HEADS=next_power_of_2(kv_heads), HALF=head_dim // 2, BLOCK=next_power_of_2(head_dim // 2),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def context_ingest(
    rows: torch.Tensor,
    norm: torch.Tensor,
    projection: torch.Tensor,
    bias: torch.Tensor | None,
    key_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
    value_scale: float = 1.0,
) -> None:
    """The operator: rows [n, H] before their norm, norm [H], projection [L·2·K·D, H], bias [L·2·K·D] or None, the rest as
    `store_context`. Norm and product are torch's on every device."""
    if rows.dim() != 2 or projection.shape != (cache[0].numel(), rows.shape[1]):
        raise ValueError(
            f"context_ingest: expected rows [n, H] and projection [L·2·K·D, H] for cache {tuple(cache.shape)}, got {tuple(rows.shape)} and "
            f"{tuple(projection.shape)}"
        )
    context = F.rms_norm(rows, rows.shape[1:], norm, eps)
    kv = F.linear(context, projection, bias).view(rows.shape[0], *cache.shape[1:])
    store_context(kv, key_norm, cos, sin, slots, cache, eps=eps, value_scale=value_scale)


def context_ingest_traffic(num_rows: int, num_layers: int, kv_heads: int, head_dim: int, itemsize: int) -> Traffic:
    """Model of the kernel: every layer reads the row's slot and tables, and every row the layer's norm."""
    values = num_rows * num_layers * 2 * kv_heads * head_dim * itemsize
    tables = num_rows * 2 * head_dim * itemsize
    norms = num_layers * head_dim * itemsize
    read = values + num_layers * (tables + num_rows * 8) + num_rows * norms
    least = 2 * values + tables + num_rows * 8 + norms
    return Traffic(read, values, least, num_rows * num_layers * kv_heads * head_dim * 8)


def traffic_cases() -> Iterator[TrafficCase]:
    """What a step commits to the published drafter, and a prompt's chunk, bf16."""
    for rows in (*(batch * DRAFT_BLOCK for batch in BATCHES), 2048):
        traffic = context_ingest_traffic(rows, DRAFTER_LAYERS, NUM_KV_HEADS, HEAD_DIM, 2)
        yield TrafficCase(
            OPERATOR.name, f"{rows} rows, {DRAFTER_LAYERS} layers of 2×{NUM_KV_HEADS}×{HEAD_DIM}, bf16", traffic
        )


def compile_cases() -> Iterator[CompileCase]:
    """The published drafter."""
    strides = (
        "kv_row_stride", "kv_layer_stride", "kv_kind_stride", "kv_head_stride", "norm_stride", "cos_stride", "sin_stride",
        "cache_slot_stride", "cache_layer_stride", "cache_kind_stride", "cache_head_stride",
    )  # fmt: skip
    for kind in ("bf16", "fp32"):
        yield CompileCase(
            f"context_ingest {kind}", _store_context_kernel,
            {
                **dict.fromkeys(("kv_ptr", "norm_ptr", "cos_ptr", "sin_ptr", "cache_ptr"), f"*{kind}"), "slots_ptr": "*i64",
                "eps": "fp32", "value_scale": "fp32", **dict.fromkeys(("num_slots", *strides), "i32"),
            },
            {"KV_HEADS": NUM_KV_HEADS, "HEADS": NUM_KV_HEADS, "HALF": HEAD_DIM // 2, "BLOCK": HEAD_DIM // 2}, divisible=strides,
        )  # fmt: skip
