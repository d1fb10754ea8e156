"""What lies between a decoder layer's products, on a CPU with AVX512: norm, rotation with K/V store, gated activation; one call each.

Torch takes five to nine small operators for each of them, which for few rows cost more than what they move. A row is computed alone,
in one order, so its bits do not depend on how many there are. All fp32. Shapes: T rows, H any width, N query heads, K KV heads, D head size.
"""

import ctypes
import functools
from typing import Any

import torch

from dflash2_kernels.native import library

_NUMBER, _POINTER = ctypes.c_long, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [_POINTER, _POINTER, ctypes.c_float, _POINTER, _NUMBER, _NUMBER],
    "silu_gate": [_POINTER, _POINTER, _NUMBER, _NUMBER],
    "rotate_and_store": [
        _POINTER, _POINTER, ctypes.c_float, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, *[_NUMBER] * 4,
    ],
}  # fmt: skip


def available() -> bool:
    """Whether this machine can run them."""
    return library() is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x […, H] / sqrt(mean(x²) + eps), times weight [H] if given. Raises ValueError."""
    width = x.shape[-1]
    if weight is not None and tuple(weight.shape) != (width,):
        raise ValueError(f"rms_norm: expected weight [{width}], got {list(weight.shape)}")
    x, weight = _plain("rms_norm", x), None if weight is None else _plain("rms_norm", weight)
    y = torch.empty_like(x)
    _function("rms_norm")(
        x.data_ptr(),
        None if weight is None else weight.data_ptr(),
        eps,
        y.data_ptr(),
        x.numel() // max(1, width),
        width,
    )
    return y


def silu_gate(both: torch.Tensor) -> torch.Tensor:
    """both [T, 2 · H] → silu(both[:, :H]) · both[:, H:]. Raises ValueError."""
    both = _plain("silu_gate", both)
    out = torch.empty(both.shape[0], both.shape[1] // 2)
    _function("silu_gate")(both.data_ptr(), out.data_ptr(), *out.shape)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    head_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    """qkv [P, N + 2·K, D], P ≥ T; head_norm [N + K, D]: weights of a norm per head, before the rotation; cos and signed_sin as of
    `models.rotary` [P, 1, D]; slots [T] int64. Keys and values of the first T rows go into cache [slots, 2, K, D] → their rotated
    queries [P, N, D]; those from T on mean nothing. Raises ValueError."""
    num_slots, _, kv_heads, dim = cache.shape
    num_rows, heads = slots.shape[0], qkv.shape[1] - 2 * kv_heads
    wanted = [("qkv", qkv, [max(num_rows, qkv.shape[0]), qkv.shape[1], dim])]
    wanted += [(name, one, [qkv.shape[0], 1, dim]) for name, one in (("cos", cos), ("signed_sin", signed_sin))]
    if head_norm is not None:
        wanted.append(("head_norm", head_norm, [heads + kv_heads, dim]))
    for name, one, shape in wanted:
        if list(one.shape) != shape:
            raise ValueError(f"rotate_and_store: expected {name} {shape}, got {list(one.shape)}")
    if heads <= 0 or dim % 16 or dim > 256 or slots.dtype != torch.int64 or not cache.is_contiguous():
        raise ValueError(
            f"rotate_and_store: expected query heads, heads of a multiple of 16 up to 256, int64 slots and a contiguous cache; got "
            f"{heads} heads of {dim}, {slots.dtype}, strides {cache.stride()}"
        )
    qkv, cos, signed_sin = (_plain("rotate_and_store", one) for one in (qkv, cos, signed_sin))
    head_norm = None if head_norm is None else _plain("rotate_and_store", head_norm)
    slots, cache = slots.contiguous(), _plain("rotate_and_store", cache)
    query = torch.empty(qkv.shape[0], heads, dim)
    failed = _function("rotate_and_store")(
        qkv.data_ptr(), None if head_norm is None else head_norm.data_ptr(), eps, cos.data_ptr(), signed_sin.data_ptr(),
        slots.data_ptr(), num_slots, query.data_ptr(), cache.data_ptr(), num_rows, heads, kv_heads, dim,
    )  # fmt: skip
    if failed:
        raise ValueError(f"rotate_and_store: expected slots below {num_slots}, got {slots.tolist()}")
    return query


def _plain(name: str, one: torch.Tensor) -> torch.Tensor:
    if one.dtype != torch.float32 or one.device.type != "cpu":
        raise ValueError(f"{name}: expected fp32 on a CPU, got {one.dtype} on {one.device}")
    return one.contiguous()


@functools.cache
def _function(name: str) -> Any:
    found = library()
    if found is None:
        raise RuntimeError(f"{name}: this machine cannot run it")
    function = found[name]
    function.argtypes = _ARGUMENTS[name]
    function.restype = ctypes.c_int
    return function
