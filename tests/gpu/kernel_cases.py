"""Every operator with operands of a model's real shape: how to call it, what it must give, and the bytes that it cannot avoid."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sizes import Sizes

from dflash2_kernels import (
    add_rms_norm,
    context_ingest,
    grouped_conv,
    kv_store,
    paged_attention,
    rejection,
    selector_walk,
    vocab_topk,
)
from dflash2_kernels.rejection import RejectionRows
from dflash2_kernels.traffic import Traffic

_PAGE = 16
_EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """operands(): fresh ones. call and reference: tensors from operands. tolerance 0: equal to the bit. checked: small enough for the reference."""

    operator: str
    shape: str
    traffic: Traffic
    operands: Callable[[], tuple]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: float
    checked: bool = True


def cases(size: Sizes, device: str) -> Iterator[Case]:
    """bf16, in the order of the catalogue."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    hidden, block = size.hidden, size.draft_block
    for batch in size.batches:
        rows, groups = batch * block, hidden // size.conv_group
        yield Case(
            "grouped_conv", f"{batch}×{block}×{hidden}", grouped_conv.grouped_conv_traffic(batch, block, hidden, groups, size.conv_taps, 2),
            lambda b=batch, g=groups: (normal(b, block, hidden), normal(b, block, size.conv_taps, g), normal(size.conv_taps, hidden)),
            grouped_conv.grouped_conv, grouped_conv.grouped_conv_reference, 0.0,
        )  # fmt: skip
        yield Case(
            "add_rms_norm", f"{rows}×{hidden}", add_rms_norm.add_rms_norm_traffic(rows, hidden, 2),
            lambda r=rows: (normal(r, hidden), normal(r, hidden), normal(hidden)),
            lambda x, residual, weight: add_rms_norm.add_rms_norm(x, residual, weight, _EPS),
            lambda x, residual, weight: add_rms_norm.add_rms_norm_reference(x, residual, weight, _EPS), 2**-6,
        )  # fmt: skip
        slots = batch * (block - 1)
        yield Case(
            "vocab_topk", f"{slots}×{size.vocab}, top {size.candidates}", vocab_topk.vocab_topk_traffic(slots, size.vocab, size.candidates, 2),
            lambda s=slots: (normal(s, size.vocab),),
            lambda logits: vocab_topk.vocab_topk(logits, size.candidates), lambda logits: vocab_topk.vocab_topk_reference(logits, size.candidates),
            0.0, batch <= 8,
        )  # fmt: skip
        yield Case(
            "selector_walk", f"{batch} requests", selector_walk.selector_walk_traffic(batch, block - 1, size.candidates, size.rank, 2),
            lambda b=batch: _walk(size, b, normal, whole, device), selector_walk.selector_walk, selector_walk.selector_walk_reference, 2e-4, batch <= 8,
        )  # fmt: skip
        yield Case(
            "sparse_rejection", f"{batch}×{block}×{size.vocab}",
            rejection.sparse_rejection_traffic(batch, block, size.vocab, size.candidates),
            lambda b=batch: _rejection(size, b, normal, whole, device), rejection.sparse_rejection, rejection.sparse_rejection_reference, 0.0, batch <= 8,
        )  # fmt: skip
        yield Case(
            "kv_store", f"{rows} rows", kv_store.kv_store_traffic(rows, size.kv_heads, size.head_dim, 2),
            lambda r=rows: (
                normal(r, 2, size.kv_heads, size.head_dim), torch.randperm(4 * r, generator=generator, device=device)[:r],
                normal(4 * r, 2, size.kv_heads, size.head_dim),
            ),
            _in_place(kv_store.kv_store), _in_place(kv_store.kv_store_reference), 0.0,
        )  # fmt: skip
        for kv_len in size.kv_lens:
            for width in (block, 1):
                yield Case(
                    "paged_attention", f"{batch} requests, {width} rows, {kv_len} keys",
                    paged_attention.paged_attention_traffic(batch, width, kv_len, size.heads, size.kv_heads, size.head_dim, 2),
                    lambda b=batch, w=width, n=kv_len: _attention(size, b, w, n, normal, generator, device),
                    lambda *own: paged_attention.paged_attention(*own[:6], _PAGE, own[6], max_num_rows=own[7], max_kv_len=own[8]),
                    lambda *own: paged_attention.paged_attention_reference(*own[:6], _PAGE, own[6]), 2e-2, batch * kv_len <= 65536,
                )  # fmt: skip
        yield Case(
            "context_ingest", f"{rows} rows, {size.drafter_layers} layers",
            context_ingest.context_ingest_traffic(rows, size.drafter_layers, size.kv_heads, size.head_dim, 2),
            lambda r=rows: (
                normal(r, size.drafter_layers, 2, size.kv_heads, size.head_dim), normal(size.drafter_layers, size.head_dim),
                normal(r, size.head_dim), normal(r, size.head_dim), torch.randperm(4 * r, generator=generator, device=device)[:r],
                normal(4 * r, size.drafter_layers, 2, size.kv_heads, size.head_dim),
            ),
            _in_place(lambda *own: context_ingest.store_context(*own, eps=_EPS)),
            _in_place(lambda *own: context_ingest.store_context_reference(*own, _EPS, 1.0)), 2**-6,
        )  # fmt: skip


def _in_place(store: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """The cache, which comes last, behind the call."""

    def call(*operands: torch.Tensor) -> torch.Tensor:
        store(*operands)
        return operands[-1]

    return call


def _walk(size: Sizes, batch: int, normal: Callable, whole: Callable, device: str) -> tuple:
    slots, candidates = size.draft_block - 1, size.candidates
    ids = torch.stack(
        [torch.randperm(size.vocab, device=device)[:candidates].sort().values for _ in range(batch * slots)]
    )
    rules = torch.tensor(
        [(selector_walk.GREEDY, selector_walk.DRAW, selector_walk.RACE)[r % 3] for r in range(batch)],
        dtype=torch.int32,
        device=device,
    )
    return (
        normal(batch, slots, candidates, dtype=torch.float32), ids.view(batch, slots, candidates), normal(batch, slots, size.rank),
        normal(size.vocab, size.rank), normal(size.vocab, size.rank), whole(size.vocab, batch), torch.full((batch,), 0.8, device=device), rules,
        torch.arange(batch, device=device) * 977 + 5, torch.arange(batch, device=device) * 31 + 100,
    )  # fmt: skip


def _rejection(size: Sizes, batch: int, normal: Callable, whole: Callable, device: str) -> tuple:
    """Drafts that are likely under q, which is near p: some stand."""
    slots = size.draft_block - 1
    logits = normal(batch * size.draft_block, size.vocab, dtype=torch.float32) * 3
    best = logits.view(batch, size.draft_block, -1)[:, :slots].topk(size.candidates, dim=-1)
    own = torch.full((batch,), 0.0, device=device)
    rows = RejectionRows(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * size.draft_block, best.indices[..., 0].contiguous(), best.indices,
        best.values.softmax(-1), own + 0.8, torch.zeros(batch, dtype=torch.int32, device=device), own + 1.0, own,
        torch.arange(batch, device=device) * 977 + 5, torch.arange(batch, device=device) * 31 + 100,
    )  # fmt: skip
    return logits, rows


def _attention(
    size: Sizes, batch: int, width: int, kv_len: int, normal: Callable, generator: torch.Generator, device: str
) -> tuple:
    pages = -(-kv_len // _PAGE)
    table = torch.randperm(batch * pages, generator=generator, device=device).to(torch.int32).view(batch, pages)
    numbers = torch.arange(batch, dtype=torch.int32, device=device)
    return (
        normal(batch * width, size.heads, size.head_dim), normal(batch * pages * _PAGE, 2, size.kv_heads, size.head_dim), table, numbers * width,
        torch.full_like(numbers, width), torch.full_like(numbers, kv_len), size.head_dim**-0.5, width, kv_len,
    )  # fmt: skip
