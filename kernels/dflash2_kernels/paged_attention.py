"""Attention of short query blocks over pages: verification (causal) and drafting (bidirectional), grouped heads, long contexts split.

    out[i, h] = Σ_j softmax_j(scale · q[i, h] · k[j, h // G]) · v[j, h // G]     over the j that i sees:
    j < kv_len  and  (not causal or j ≤ i)  and  i - j < W  and  (causal or j - i < W);  a sink adds exp(sink[h]) to the denominator

i and j are absolute positions: the rows of request r are positions kv_len[r] - num_rows[r] … kv_len[r] - 1 and position j lies in slot
page_table[r, j // page_size] · page_size + j % page_size. Their keys and values are stored already (`kv_store`).
Every row has its own window. Softmax in fp32; weights are rounded to the cache's type before they meet the values.

A row's bits do not depend on its neighbours: tiles of keys and splits start at fixed positions, splits are added in order, and one tile
of query rows serves every number of rows. So the rows of a verified draft are, bit for bit, those of plain decoding; libraries
(flash-attn, FlashInfer, torch's own) choose tiles and splits by the batch, which is why this operator names none.

Shapes: R requests, T rows of the flat batch, N query heads, K KV heads, G = N / K, D head size, Q rows of a request.
Bytes: reads Σ_r kv_len·2·K·D + T·N·D values, writes T·N·D. A tile holds BLOCK_M / G query rows of one KV head; every further tile of a
request reads its keys again. Split requests also write and read (D + 2) fp32 values per row, head and split.
"""

from collections.abc import Iterator

import torch

from dflash2_kernels.ahead_of_time import CompileCase
from dflash2_kernels.backend import Operator
from dflash2_kernels.published_shapes import BATCHES, DRAFT_BLOCK, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS
from dflash2_kernels.rounding import rounded
from dflash2_kernels.traffic import Traffic, TrafficCase
from dflash2_kernels.triton_import import INTERPRETED, ceil_div, jit, next_power_of_2, tl

OPERATOR = Operator("paged_attention")
SPLIT = 640  # keys per program: one split's partial results cost 11 % of its keys and values at 8 rows of 4 heads (512: 14 %)
_NO_WINDOW = 1 << 30
_LOG2E = 1.4426950408889634


def paged_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    row_starts: torch.Tensor,
    num_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments as `paged_attention`; request by request, everything but the rounded weights in fp32."""
    num_heads, head_dim = query.shape[1:]
    kv_heads = cache.shape[2]
    groups = num_heads // kv_heads
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for request, (start, rows, length) in enumerate(
        zip(row_starts.tolist(), num_rows.tolist(), kv_lens.tolist(), strict=True)
    ):
        if rows == 0:
            continue
        keys_at = torch.arange(length, device=query.device)
        slots = page_table[request, keys_at // page_size].long() * page_size + keys_at % page_size
        keys, values = cache[slots].float().unbind(1)  # [kv_len, K, D]
        q = query[start : start + rows].float().view(rows, kv_heads, groups, head_dim)
        scores = torch.einsum("ikgd,jkd->kgij", q, keys) * scale
        i = torch.arange(length - rows, length, device=query.device)[:, None]
        hidden = keys_at > i if causal else torch.zeros(rows, length, dtype=torch.bool, device=query.device)
        if window is not None:
            hidden = hidden | (i - keys_at >= window) | (keys_at - i >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(kv_heads, groups, 1, 1).expand(-1, -1, rows, 1)
            weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        mixed = torch.einsum("kgij,jkd->ikgd", weights.to(cache.dtype).float(), values)
        out[start : start + rows] = mixed.reshape(rows, num_heads, head_dim).to(query.dtype)
    return out


@jit
def _key_range(base, first_row, stop_row, kv_len, back, ahead):
    """Positions low … high - 1 hold every key that rows first_row … stop_row - 1 of a request see."""
    return tl.maximum(base + first_row - back, 0), tl.minimum(base + stop_row + ahead, kv_len)


@jit
def _dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a · b. Triton's interpreter multiplies the bit patterns of bf16, so there they are widened, which changes no product."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def _finish(m, total, acc, sinks_ptr, head, real, HAS_SINKS: tl.constexpr):
    """The weighted sum over its denominator, the heads' sinks in it; m counts in powers of two."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
    return acc / total[:, None]


@jit
def _attend_kernel(
    query_ptr, cache_ptr, pages_ptr, starts_ptr, rows_ptr, lens_ptr, sinks_ptr, out_ptr, parts_ptr, sums_ptr,
    tiles, back, ahead, scale_log2,
    query_row_stride, query_head_stride, cache_slot_stride, cache_kind_stride, cache_head_stride, pages_stride,
    out_row_stride, out_head_stride,
    HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of a request's query rows (all G heads of one KV head) over one split of its keys: program (request · tile, KV head,
    split). Writes the result where SPLITS is 1, else maximum, sum and weighted values for `_combine_kernel`."""
    request = tl.program_id(0) // tiles
    ROWS: tl.constexpr = BLOCK_M // GROUPS
    first_row = tl.program_id(0) % tiles * ROWS
    num_rows = tl.load(rows_ptr + request)
    if first_row >= num_rows:
        return
    kv_head, split = tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(lens_ptr + request)
    base = kv_len - num_rows
    stop_row = tl.minimum(first_row + ROWS, num_rows)
    low, high = _key_range(base, first_row, stop_row, kv_len, back, ahead)
    number = low // SPLIT + split
    start = tl.maximum(number * SPLIT, low // KEYS * KEYS)
    stop = tl.minimum(number * SPLIT + SPLIT, high)
    if start >= stop:
        return
    fold = tl.arange(0, BLOCK_M)
    row = first_row + fold // GROUPS
    head = kv_head * GROUPS + fold % GROUPS
    real = (fold < ROWS * GROUPS) & (row < num_rows)
    dim = tl.arange(0, BLOCK_D)
    inside = dim < HEAD_DIM
    at = tl.load(starts_ptr + request).to(tl.int64) + row
    q = tl.load(
        query_ptr + at[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=real[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    position = base + row
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    pages = pages_ptr + request.to(tl.int64) * pages_stride
    keys_ptr = cache_ptr + kv_head.to(tl.int64) * cache_head_stride
    for first_key in range(start, stop, KEYS):
        j = first_key + tl.arange(0, KEYS)
        held = (j >= low) & (j < stop)
        page = tl.load(pages + j // PAGE_SIZE, mask=held, other=0).to(tl.int64)
        slot = (page * PAGE_SIZE + j % PAGE_SIZE) * cache_slot_stride
        k = tl.load(keys_ptr + slot[None, :] + dim[:, None], mask=held[None, :] & inside[:, None], other=0.0)
        scores = _dot(q, k, tl.zeros([BLOCK_M, KEYS], dtype=tl.float32), WIDEN) * scale_log2
        distance = (position + ahead)[:, None] - j[None, :]
        scores = tl.where(held[None, :] & (distance >= 0) & (distance <= back + ahead), scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, axis=1))
        origin = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        shrink = tl.exp2(m - origin)
        weights = tl.exp2(scores - origin[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(
            keys_ptr + cache_kind_stride + slot[:, None] + dim[None, :], mask=held[:, None] & inside[None, :], other=0.0
        )
        acc = _dot(rounded(weights, v.dtype), v, acc * shrink[:, None], WIDEN)
        m = top
    if SPLITS == 1:
        out = _finish(m, total, acc, sinks_ptr, head, real, HAS_SINKS)
        tl.store(
            out_ptr + at[:, None] * out_row_stride + head[:, None] * out_head_stride + dim[None, :],
            rounded(out, out_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :],
        )  # fmt: skip
    else:
        part = (at * tl.num_programs(1) * GROUPS + head) * SPLITS + split
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=real[:, None] & inside[None, :])
        tl.store(sums_ptr + part * 2, m, mask=real)
        tl.store(sums_ptr + part * 2 + 1, total, mask=real)


@jit
def _combine_kernel(
    parts_ptr, sums_ptr, starts_ptr, rows_ptr, lens_ptr, sinks_ptr, out_ptr,
    tiles, back, ahead, out_row_stride, out_head_stride,
    HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Adds one row's splits in order, for the G heads of one KV head: program (request · row of all tiles, KV head)."""
    ROWS: tl.constexpr = BLOCK_M // GROUPS
    request = tl.program_id(0) // (tiles * ROWS)
    own_row = tl.program_id(0) % (tiles * ROWS)
    num_rows = tl.load(rows_ptr + request)
    if own_row >= num_rows:
        return
    kv_head = tl.program_id(1)
    kv_len = tl.load(lens_ptr + request)
    first_row = own_row // ROWS * ROWS
    stop_row = tl.minimum(first_row + ROWS, num_rows)
    low, high = _key_range(kv_len - num_rows, first_row, stop_row, kv_len, back, ahead)
    count = (high - 1) // SPLIT - low // SPLIT + 1
    group = tl.arange(0, HEADS)
    real = group < GROUPS
    head = kv_head * GROUPS + group
    dim = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (dim < HEAD_DIM)[None, :]
    at = tl.load(starts_ptr + request).to(tl.int64) + own_row
    part = (at * tl.num_programs(1) * GROUPS + head) * SPLITS
    m = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    for split in range(count):
        m = tl.maximum(m, tl.load(sums_ptr + (part + split) * 2, mask=real, other=0.0))
    total = tl.zeros([HEADS], dtype=tl.float32)
    acc = tl.zeros([HEADS, BLOCK_D], dtype=tl.float32)
    for split in range(count):
        shrink = tl.exp2(tl.load(sums_ptr + (part + split) * 2, mask=real, other=0.0) - m)
        total += shrink * tl.load(sums_ptr + (part + split) * 2 + 1, mask=real, other=0.0)
        acc += shrink[:, None] * tl.load(
            parts_ptr + (part + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0
        )
    out = _finish(m, total, acc, sinks_ptr, head, real, HAS_SINKS)
    out = rounded(out, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at * out_row_stride + head[:, None] * out_head_stride + dim[None, :], out, mask=mask)


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    row_starts: torch.Tensor,
    num_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    scale: float,
    *,
    max_num_rows: int,
    max_kv_len: int,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator: query [P, N, D], cache [slots, 2, K, D], page_table [R, pages] int32, row_starts, num_rows and kv_lens [R] int32,
    sinks [N] → `out` [P, N, D] (a new tensor of zeros if None).

    Rows that no request names are left alone, and a request of 0 rows (padding) reads and writes nothing, whatever its other
    numbers are. max_num_rows, max_kv_len: at least those of every request; they size the launch, so that nothing is read back from
    the device. The last dimensions must be contiguous. Raises ValueError on shapes that do not fit.
    """
    _check(query, cache, page_table, (row_starts, num_rows, kv_lens), page_size, window, sinks, out)
    if not OPERATOR.uses_kernel(query, cache, page_table, row_starts, num_rows, kv_lens):
        result = paged_attention_reference(
            query,
            cache,
            page_table,
            row_starts,
            num_rows,
            kv_lens,
            page_size,
            scale,
            causal=causal,
            window=window,
            sinks=sinks,
        )
        if out is None:
            return result
        for start, rows in zip(row_starts.tolist(), num_rows.tolist(), strict=True):
            out[start : start + rows] = result[start : start + rows]
        return out
    if out is None:
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    if max_num_rows == 0 or row_starts.shape[0] == 0:
        return out
    num_heads, head_dim = query.shape[1:]
    kv_heads = cache.shape[2]
    groups = num_heads // kv_heads
    tile = tile_shape(groups, head_dim, query.element_size())
    own_rows = tile["BLOCK_M"] // groups
    tiles = ceil_div(max_num_rows, own_rows)
    splits = _num_splits(max_kv_len, min(max_num_rows, own_rows), causal, window)
    parts = sums = out
    if splits > 1:
        parts = torch.empty(query.shape[0], num_heads, splits, head_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(query.shape[0], num_heads, splits, 2, dtype=torch.float32, device=query.device)
    back = (_NO_WINDOW if window is None else window) - 1  # a row sees keys from `back` behind to `ahead` before it
    ahead = 0 if causal else back
    spread = sinks if sinks is not None else out
    how = _constants(groups, head_dim, tile["BLOCK_M"], splits, sinks is not None)
    num_requests = row_starts.shape[0]
    _attend_kernel[(num_requests * tiles, kv_heads, splits)](
        query, cache, page_table, row_starts, num_rows, kv_lens, spread, out, parts, sums,
        tiles, back, ahead, scale * _LOG2E,
        query.stride(0), query.stride(1), *cache.stride()[:3], page_table.stride(0), out.stride(0), out.stride(1),
        PAGE_SIZE=page_size, WIDEN=INTERPRETED, **{**how, **tile},
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_requests * tiles * own_rows, kv_heads)](
            parts, sums, row_starts, num_rows, kv_lens, spread, out, tiles, back, ahead, out.stride(0), out.stride(1),
            HEADS=next_power_of_2(groups), **how, num_warps=4,
        )  # fmt: skip
    return out


def tile_shape(groups: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """BLOCK_M (folded query rows: room for eight rows of G heads, at least one tensor-core tile) and KEYS per tile, warps and stages.
    A function of the model only, so that a row's bits never depend on the batch. The tiles are the largest that spill nowhere."""
    if itemsize > 2:  # no tensor cores: fp32 is for checking
        return {"BLOCK_M": max(32, next_power_of_2(groups)), "KEYS": 32, "num_warps": 8, "num_stages": 1}
    block_m = max(64, next_power_of_2(8 * groups))
    return {"BLOCK_M": block_m, "KEYS": 64, "num_warps": 8 if head_dim > 64 or block_m > 64 else 4, "num_stages": 2}


def _constants(groups: int, head_dim: int, block_m: int, splits: int, has_sinks: bool) -> dict[str, int | bool]:
    """What both kernels are specialised for."""
    return {
        "GROUPS": groups, "HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim)), "BLOCK_M": block_m, "SPLIT": SPLIT,
        "SPLITS": splits, "HAS_SINKS": has_sinks,
    }  # fmt: skip


def _num_splits(max_kv_len: int, rows: int, causal: bool, window: int | None) -> int:
    """The most splits that a tile of `rows` rows meets."""
    splits = max(1, ceil_div(max_kv_len, SPLIT))
    if window is None:
        return splits
    span = window + rows - 1 if causal else 2 * window + rows - 2
    return min(splits, (span - 2) // SPLIT + 2 if span > 1 else 1)


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    spans: tuple[torch.Tensor, ...],
    page_size: int,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f"paged_attention: {what}")

    if query.dim() != 3 or cache.dim() != 4 or cache.shape[1] != 2 or cache.shape[3] != query.shape[2]:
        refuse(
            f"expected query [P, N, D] and cache [slots, 2, K, D], got {tuple(query.shape)} and {tuple(cache.shape)}"
        )
    if query.shape[1] % cache.shape[2]:
        refuse(f"expected a multiple of {cache.shape[2]} query heads, got {query.shape[1]}")
    if query.dtype != cache.dtype:
        refuse(f"expected one type, got query {query.dtype} and cache {cache.dtype}")
    if query.stride(2) != 1 or cache.stride(3) != 1 or (out is not None and out.stride(2) != 1):
        refuse("expected contiguous heads")
    if page_table.dim() != 2 or any(one.shape != page_table.shape[:1] for one in spans):
        refuse(
            f"expected page_table [R, pages] and spans [R], got {tuple(page_table.shape)} and {[tuple(one.shape) for one in spans]}"
        )
    if page_size < 1 or (window is not None and window < 1):
        refuse(f"expected page_size and window of at least 1, got {page_size} and {window}")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        refuse(f"expected sinks [{query.shape[1]}], got {tuple(sinks.shape)}")
    if out is not None and (out.shape != query.shape or out.dtype != query.dtype):
        refuse(f"expected out {tuple(query.shape)} {query.dtype}, got {tuple(out.shape)} {out.dtype}")


def paged_attention_traffic(
    num_requests: int,
    rows: int,
    kv_len: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    window: int | None = None,
) -> Traffic:
    """Model of one causal call of equal requests. Page numbers are left out: 4 bytes per key tile of a program."""
    groups = num_heads // kv_heads
    own_rows = tile_shape(groups, head_dim, itemsize)["BLOCK_M"] // groups
    read = written = pairs = 0
    for first in range(0, rows, own_rows):
        stop = min(first + own_rows, rows)
        low = max(0, kv_len - rows + first - (window or _NO_WINDOW) + 1)
        keys = kv_len - rows + stop - low
        splits = (low + keys - 1) // SPLIT - low // SPLIT + 1
        read += keys * 2 * kv_heads * head_dim * itemsize + splits * (stop - first) * num_heads * head_dim * itemsize
        if _num_splits(kv_len, min(rows, own_rows), True, window) > 1:
            written += splits * (stop - first) * num_heads * (head_dim + 2) * 4
        pairs += keys * (stop - first) * num_heads
    seen = min(kv_len, (window or kv_len) + rows - 1)
    ends = rows * num_heads * head_dim * itemsize
    least = seen * 2 * kv_heads * head_dim * itemsize + 2 * ends
    return Traffic(
        num_requests * (read + written),
        num_requests * (written + ends),
        num_requests * least,
        num_requests * pairs * 4 * head_dim,
    )


def traffic_cases() -> Iterator[TrafficCase]:
    """Verification and plain decoding of the published target, bf16, and a prompt's chunk."""
    for rows in (DRAFT_BLOCK, 1):
        for batch in BATCHES:
            for kv_len in (512, 8192):
                traffic = paged_attention_traffic(batch, rows, kv_len, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 2)
                yield TrafficCase(OPERATOR.name, f"{batch} requests, {rows} rows, {kv_len} keys, bf16", traffic)
    traffic = paged_attention_traffic(1, 1024, 8192, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 2)
    why = "each tile of 16 query rows reads the keys again, most of them from L2; long chunks are bound by arithmetic, not by memory"
    yield TrafficCase(OPERATOR.name, "1 request, 1024 rows, 8192 keys, bf16", traffic, why)


def compile_cases() -> Iterator[CompileCase]:
    """The published target and drafter, and heads of other shapes. Causal, bidirectional and windowed rows run the same code."""
    pointers = ("query_ptr", "cache_ptr", "out_ptr")
    tables = ("pages_ptr", "starts_ptr", "rows_ptr", "lens_ptr")
    strides = ("query_row_stride", "query_head_stride", "cache_slot_stride", "cache_kind_stride", "cache_head_stride")
    out_strides = ("out_row_stride", "out_head_stride")
    shapes = (
        ("bf16", "bf16", NUM_HEADS // NUM_KV_HEADS, HEAD_DIM, False),
        ("fp32", "fp32", NUM_HEADS // NUM_KV_HEADS, HEAD_DIM, False),
        ("7 heads of 64", "bf16", 7, 64, False),
        ("heads of 256, sinks", "bf16", 8, 256, True),
        ("16 heads per KV head", "bf16", 16, HEAD_DIM, False),
    )
    for name, kind, groups, head_dim, has_sinks in shapes:
        tile = tile_shape(groups, head_dim, 2 if kind == "bf16" else 4)
        for splits in (1, 13):
            how = _constants(groups, head_dim, tile["BLOCK_M"], splits, has_sinks)
            partial = kind if splits == 1 else "fp32"
            signature = {
                **dict.fromkeys(pointers, f"*{kind}"), **dict.fromkeys(tables, "*i32"), "sinks_ptr": f"*{kind}",
                "parts_ptr": f"*{partial}", "sums_ptr": f"*{partial}", "tiles": "i32", "back": "i32", "ahead": "i32", "scale_log2": "fp32",
                **dict.fromkeys((*strides, "pages_stride", *out_strides), "i32"),
            }  # fmt: skip
            yield CompileCase(
                f"paged_attention {name}, {splits} split{'s' * (splits > 1)}", _attend_kernel, signature,
                {**how, "PAGE_SIZE": 16, "WIDEN": False, "KEYS": tile["KEYS"]}, tile["num_warps"], tile["num_stages"], (*strides, *out_strides), True,
            )  # fmt: skip
        yield CompileCase(
            f"paged_attention {name}, combining", _combine_kernel,
            {
                "parts_ptr": "*fp32", "sums_ptr": "*fp32", **dict.fromkeys(tables[1:], "*i32"), "sinks_ptr": f"*{kind}",
                "out_ptr": f"*{kind}", "tiles": "i32", "back": "i32", "ahead": "i32", **dict.fromkeys(out_strides, "i32"),
            },
            {**how, "HEADS": next_power_of_2(groups)}, num_warps=4, divisible=out_strides, fp_fusion=True,
        )  # fmt: skip
