"""Attention row by row in C: it equals a plain softmax over what each row sees, and a row's bits are its own."""

import pytest
import torch

from dflash2_kernels import row_attention
from dflash2_kernels.row_attention import RowSpans

pytestmark = pytest.mark.skipif(
    not row_attention.available(64), reason="needs AVX512-bf16 without AMX, and a C compiler"
)
PAGE = 4


def make(kv_lens, kv_heads, groups, head_dim, seed=0):
    """Queries for every position of every request, a cache with scattered pages, and each request's slots."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-kv_len // PAGE) for kv_len in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    cache = torch.randn((sum(counts) + 3) * PAGE, 2, kv_heads, head_dim, generator=generator)
    queries = [torch.randn(kv_len, kv_heads * groups, head_dim, generator=generator) for kv_len in kv_lens]
    return queries, cache, pages


def expected(query, position, cache, pages, scaling, window):
    """One row [N, D] in fp64, without paging."""
    low = 0 if window is None else max(0, position - window + 1)
    slots = [pages[p // PAGE] * PAGE + p % PAGE for p in range(low, position + 1)]
    keys, values = cache[slots].double().unbind(1)
    heads = query.shape[0] // keys.shape[1]
    keys, values = (one.repeat_interleave(heads, 1).transpose(0, 1) for one in (keys, values))
    weights = torch.softmax(scaling * (keys @ query.double()[:, :, None]), 1)
    return (weights * values).sum(1).flatten()


def step(queries, cache, pages, parts, scaling, window, spare=0):
    """parts: (request, first position, rows) → [T + spare, N * D]"""
    rows = [queries[who][first : first + count] for who, first, count in parts]
    starts = [sum(count for _, _, count in parts[:index]) for index in range(len(parts))]
    spans = RowSpans(
        [(start, count, first + count) for start, (_, first, count) in zip(starts, parts, strict=True)],
        [pages[who] for who, _, _ in parts], PAGE,
    )  # fmt: skip
    query = torch.cat([*rows, torch.ones(spare, *queries[0].shape[1:])])
    return row_attention.row_attention(query, cache, spans, scaling, window)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(
    ("kv_heads", "groups", "head_dim"), [(3, 3, 64), (1, 4, 16), (2, 1, 128), (1, 2, 256), (2, 2, 96)]
)
def test_equals_the_plain_softmax(kv_heads, groups, head_dim, window):
    queries, cache, pages = make([70, 1, 16], kv_heads, groups, head_dim)
    parts = [(0, 40, 30), (1, 0, 1), (2, 13, 3)]
    got = step(queries, cache, pages, parts, head_dim**-0.5, window, spare=2)
    wanted = [
        expected(queries[who][position], position, cache, pages[who], head_dim**-0.5, window)
        for who, first, count in parts
        for position in range(first, first + count)
    ]
    torch.testing.assert_close(got[:-2].double(), torch.stack(wanted), rtol=1e-5, atol=1e-5)
    assert (got[-2:] == 0).all()


def test_rows_are_their_own():
    queries, cache, pages = make([70, 20, 33], 3, 3, 64)
    together = step(queries, cache, pages, [(2, 10, 5), (0, 40, 30), (1, 0, 20)], 0.125, None)
    alone = [step(queries, cache, pages, [(0, position, 1)], 0.125, None)[0] for position in range(40, 70)]
    assert torch.equal(together[5:35], torch.stack(alone))
    assert torch.equal(together[:5], step(queries, cache, pages, [(2, 10, 5)], 0.125, None))


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_scores_of_any_size(size):
    """Far apart, the largest takes all; weights far below it vanish instead of becoming something."""
    queries, cache, pages = make([50], 1, 2, 32)
    cache *= size
    got = step(queries, cache, pages, [(0, 0, 50)], 1.0, None)
    wanted = torch.stack([expected(queries[0][row], row, cache, pages[0], 1.0, None) for row in range(50)])
    torch.testing.assert_close(got.double(), wanted, rtol=2e-4, atol=2e-4 * size)


def test_what_does_not_fit_is_named():
    queries, cache, pages = make([5], 1, 2, 32)
    spans = RowSpans([(0, 5, 5)], pages, PAGE)
    with pytest.raises(ValueError, match=r"fp32.*torch.bfloat16"):
        row_attention.row_attention(queries[0].bfloat16(), cache, spans, 1.0)
    with pytest.raises(ValueError, match="head size 8"):
        row_attention.row_attention(queries[0][..., :8], cache[..., :8], spans, 1.0)
    with pytest.raises(ValueError, match="6 rows of 5 positions"):
        RowSpans([(0, 6, 5)], pages, PAGE)
    with pytest.raises(ValueError, match="9 positions in 2 pages of 4"):
        RowSpans([(0, 5, 9)], pages, PAGE)
    with pytest.raises(ValueError, match="expected a contiguous cache and 7 rows, got 5"):
        row_attention.row_attention(queries[0], cache, RowSpans([(2, 5, 5)], pages, PAGE), 1.0)
    assert not row_attention.available(24)
