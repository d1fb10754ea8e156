"""The k largest logits of every row of a vocabulary shard, ties broken by the lower id.

    order: value descending, then id ascending; the first k of it, as (values, global ids)

A total order on (value, id): every device gives the same answer, and the top k of shards' top k is the top k of the whole, so
tensor-parallel ranks exchange 2·k numbers per row (`merge_topk`).
Shapes: T rows, V ids of this shard, W shards. Bytes: reads T·V logits, writes 2·T·k numbers; between the two passes of the kernel each
tile of 4096 ids leaves k keys of 8 bytes.
"""

from collections.abc import Iterator

import torch

from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.published_shapes import BATCHES, CANDIDATES, DRAFT_BLOCK, VOCAB
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import ceil_div, jit, next_power_of_2, tl

OPERATOR = Operator("vocab_topk")
_TILE = 4096
_MOST_KEYS = 8192  # keys that the second pass holds in registers


def vocab_topk_reference(logits: torch.Tensor, k: int, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, V] → (values [T, k] in their type, ids [T, k] int64 that start at first_id)."""
    values, ids = torch.topk(logits, min(k + 1, logits.shape[1]), dim=-1)
    last, ids = values[:, k - 1], ids[:, :k]
    for row in (
        (values[:, k:] == last[:, None]).nonzero()[:, 0].tolist()
    ):  # which of the equals topk took is not defined
        above = (logits[row] > last[row]).nonzero()[:, 0]
        equal = (logits[row] == last[row]).nonzero()[: k - len(above), 0]
        ids[row] = torch.cat([above, equal])
    ids = ids.sort(dim=-1).values
    values, ids = _by_value(logits.gather(-1, ids), ids, k)
    return values, ids + first_id


def merge_topk(values: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k of (value, id) pairs in the operator's order: values, ids [T, W·k] → [T, k] each. Plain torch on every device."""
    by_id = ids.argsort(dim=-1)
    return _by_value(values.gather(-1, by_id), ids.gather(-1, by_id), k)


def _by_value(values: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k of pairs that stand by id, ascending in each row."""
    by_value = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return values.gather(-1, by_value), ids.gather(-1, by_value)


@jit
def _tile_keys_kernel(logits_ptr, keys_ptr, num_ids, row_stride, K: tl.constexpr, TILE: tl.constexpr):
    """The K largest keys of one tile of one row. Key: the value's bits, made to order as integers do, over the flipped id."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    value = (
        tl.load(logits_ptr + row * row_stride + ids, mask=ids < num_ids, other=0.0).to(tl.float32) + 0.0
    )  # -0 becomes 0
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    keys = tl.where(ids < num_ids, keys, -0x8000000000000000)
    for place in range(K):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + (row * tl.num_programs(1) + tile) * K + place, best)
        keys = tl.where(keys == best, -0x8000000000000000, keys)  # all keys are distinct


@jit
def _merge_keys_kernel(keys_ptr, values_ptr, ids_ptr, num_keys, first_id, K: tl.constexpr, SIZE: tl.constexpr):
    """The K largest of a row's keys, taken apart into value and id."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    keys = tl.load(keys_ptr + row * num_keys + at, mask=at < num_keys, other=-0x8000000000000000)
    for place in range(K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -0x8000000000000000, keys)
        bits = (best >> 32).to(tl.int32)
        value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
        tl.store(values_ptr + row * K + place, value.to(values_ptr.dtype.element_ty))  # exact: it came from this type
        tl.store(ids_ptr + row * K + place, 0x7FFFFFFF - (best & 0x7FFFFFFF) + first_id)


def vocab_topk(logits: torch.Tensor, k: int, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator: logits [T, V], no NaN → (values [T, k] in their type, global ids [T, k] int64), value descending, then id ascending.

    first_id: id of column 0, where this is a shard. A padded vocabulary is cut before (`logits[:, :V]` needs no copy). Raises
    ValueError unless 0 < k ≤ V.
    """
    if logits.dim() != 2 or not 0 < k <= logits.shape[1]:
        raise ValueError(f"vocab_topk: expected logits [T, V] and 0 < k ≤ V; got {tuple(logits.shape)}, k {k}")
    num_rows, num_ids = logits.shape
    tiles = ceil_div(num_ids, _TILE)
    fits = logits.dtype in (torch.bfloat16, torch.float16, torch.float32) and k <= _TILE and tiles * k <= _MOST_KEYS
    if num_rows == 0 or not fits or not OPERATOR.uses_kernel(logits):
        return vocab_topk_reference(logits, k, first_id)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    keys = torch.empty(num_rows, tiles, k, dtype=torch.int64, device=logits.device)
    values = torch.empty(num_rows, k, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    _tile_keys_kernel[(num_rows, tiles)](logits, keys, num_ids, logits.stride(0), K=k, TILE=_TILE, num_warps=8)
    _merge_keys_kernel[(num_rows,)](
        keys, values, ids, tiles * k, first_id, K=k, SIZE=next_power_of_2(tiles * k), num_warps=4
    )
    return values, ids


def vocab_topk_traffic(num_rows: int, num_ids: int, k: int, itemsize: int) -> Traffic:
    """Model of one call: the logits once, the tiles' keys out and in again. FLOPs: one comparison per id and place."""
    keys = num_rows * ceil_div(num_ids, _TILE) * k * 8
    logits, result = num_rows * num_ids * itemsize, num_rows * k * (itemsize + 8)
    return Traffic(logits + keys, keys + result, logits + result, num_rows * num_ids * k)


def traffic_cases() -> Iterator[TrafficCase]:
    """The candidates of a draft step."""
    for batch in BATCHES:
        rows = batch * (DRAFT_BLOCK - 1)
        yield TrafficCase(
            OPERATOR.name, f"{rows}×{VOCAB}, top {CANDIDATES}, bf16", vocab_topk_traffic(rows, VOCAB, CANDIDATES, 2)
        )
    yield TrafficCase(
        OPERATOR.name, f"7×{VOCAB // 4}, top {CANDIDATES}, fp32", vocab_topk_traffic(7, VOCAB // 4, CANDIDATES, 4)
    )


def compile_cases() -> Iterator[CompileCase]:
    """Both passes for 16 candidates (DFlash 2) and 128 (DFlash 1) of the published vocabulary."""
    for kind, k in (("bf16", CANDIDATES), ("fp32", CANDIDATES), ("fp32", 128)):
        signature = {"logits_ptr": f"*{kind}", "keys_ptr": "*i64", "num_ids": "i32", "row_stride": "i32"}
        constants = {"K": k, "TILE": _TILE}
        yield CompileCase(
            f"vocab_topk tiles {kind} {k}",
            _tile_keys_kernel,
            signature,
            constants,
            num_warps=8,
            divisible=("row_stride", "num_ids"),
        )
        signature = {
            "keys_ptr": "*i64",
            "values_ptr": f"*{kind}",
            "ids_ptr": "*i64",
            "num_keys": "i32",
            "first_id": "i32",
        }
        constants = {"K": k, "SIZE": next_power_of_2(ceil_div(VOCAB, _TILE) * k)}
        yield CompileCase(
            f"vocab_topk merge {kind} {k}", _merge_keys_kernel, signature, constants, divisible=("num_keys",)
        )
