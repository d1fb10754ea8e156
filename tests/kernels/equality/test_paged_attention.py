"""Paged attention: the kernel against its reference and a written-out one, whole contexts and split ones, and the bits of a row
whatever its neighbours are."""

import math

import pytest
import torch

from dflash2_kernels import paged_attention as module
from dflash2_kernels.paged_attention import SPLIT, paged_attention, paged_attention_reference
from dflash2_kernels.triton_import import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Batch:
    """Requests given as (rows, kv_len): pages in shuffled order, NaN wherever nothing may be read."""

    def __init__(
        self, spans, heads=4, kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32, seed=0, padding_rows=0
    ):
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // page_size) if rows else 0 for rows, length in spans]
        order = torch.randperm(sum(counts) + 2, generator=generator)
        self.cache = torch.full(((sum(counts) + 2) * page_size, 2, kv_heads, head_dim), math.nan, dtype=dtype)
        self.table = torch.full((len(spans), max([1, *counts])), -(1 << 20), dtype=torch.int32)
        for r, (rows, length) in enumerate(spans):
            pages = order[sum(counts[:r]) : sum(counts[: r + 1])]
            self.table[r, : len(pages)] = pages
            if rows:
                at = torch.arange(length)
                kv = torch.randn(length, 2, kv_heads, head_dim, generator=generator)
                self.cache[pages[at // page_size] * page_size + at % page_size] = kv.to(dtype)
        self.rows = torch.tensor([rows for rows, _ in spans], dtype=torch.int32)
        self.starts = torch.cumsum(self.rows, 0, dtype=torch.int32) - self.rows
        self.lens = torch.tensor([length for _, length in spans], dtype=torch.int32)
        total = int(self.rows.sum()) + padding_rows
        self.query = torch.randn(total, heads, head_dim, generator=generator).to(dtype)
        self.page_size, self.scale = page_size, head_dim**-0.5
        self.limits = {"max_num_rows": max([0, *self.rows.tolist()]), "max_kv_len": max([0, *self.lens.tolist()])}

    def operands(self):
        tensors = (self.query, self.cache, self.table, self.starts, self.rows, self.lens)
        return *(one.to(DEVICE) for one in tensors), self.page_size, self.scale

    def run(self, **options):
        return paged_attention(*self.operands(), **{**self.limits, **options}).cpu()

    def expected(self, **options):
        return paged_attention_reference(*self.operands(), **options).cpu()


def check(batch, **options):
    got, expected = batch.run(**options), batch.expected(**options)
    assert got.dtype == batch.query.dtype
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    return got


def test_the_kernel_is_what_runs_here():
    assert module.OPERATOR.implementation(DEVICE) in ("triton", "triton interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_is_its_reference(dtype, causal, window):
    check(Batch([(8, 8), (1, 1), (3, 70), (0, 5), (5, 129)], dtype=dtype), causal=causal, window=window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(1, 1, 16, 1), (6, 2, 24, 3), (7, 1, 64, 16), (16, 1, 8, 5), (32, 2, 16, 64)],
)
def test_shapes_of_heads_and_pages(heads, kv_heads, head_dim, page_size):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    check(Batch([(4, 41), (1, 67), (9, 9)], **shape))
    check(Batch([(4, 41), (1, 67), (9, 9)], dtype=torch.bfloat16, **shape), causal=False, window=6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 50, SPLIT, SPLIT + 90])
@pytest.mark.parametrize("length", [SPLIT, SPLIT + 1, 2 * SPLIT + 3])
def test_split_contexts(length, window, causal):
    check(Batch([(5, length), (2, 30), (1, SPLIT)], heads=2, kv_heads=1), causal=causal, window=window)


@pytest.mark.parametrize("lengths", [(60,), (SPLIT + 40,)], ids=["whole", "split"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_is_the_sum_written_out(lengths, causal):
    batch = Batch([(3, *lengths)], heads=2, kv_heads=1, head_dim=8, page_size=8)
    sinks = torch.tensor([0.7, -1.0])
    got = batch.run(causal=causal, window=50, sinks=sinks.to(DEVICE))
    length = lengths[0]
    at = torch.arange(length)
    keys, values = batch.cache[batch.table[0, at // 8].long() * 8 + at % 8].double().unbind(1)
    for row in range(3):
        i = length - 3 + row
        seen = [j for j in range(length) if i - j < 50 and (j <= i if causal else j - i < 50)]
        for head in range(2):
            weights = torch.stack([batch.scale * batch.query[row, head].double() @ keys[j, 0] for j in seen]).exp()
            mixed = sum(weight * values[j, 0] for weight, j in zip(weights, seen, strict=True))
            expected = mixed / (weights.sum() + sinks[head].double().exp())
            torch.testing.assert_close(got[row, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [90, SPLIT + 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(length, dtype):
    batch = Batch([(4, length), (2, 17)], dtype=dtype)
    sinks = torch.tensor([0.5, -2.0, 9.0, 0.0], dtype=dtype, device=DEVICE)
    with_sinks = check(batch, sinks=sinks)
    assert not torch.allclose(with_sinks, batch.run(), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 33])
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype, window):
    """Verification of eight rows, plain decoding of each, any company, and a launch sized for longer contexts: the same bits."""
    length = SPLIT + 4  # the eight rows lie on both sides of a split's edge
    whole = Batch([(8, length), (1, 20)], dtype=dtype)
    together = whole.run(window=window)[:8]
    one = Batch([(8, length)], dtype=dtype)
    one.cache, one.table, one.query = whole.cache, whole.table[:1], whole.query[:8]
    for row in range(8):
        one.query, one.rows, one.lens = (
            whole.query[row : row + 1],
            torch.tensor([1]).int(),
            torch.tensor([length - 7 + row]).int(),
        )
        for most in (int(one.lens[0]), 3 * SPLIT):
            alone = one.run(window=window, max_num_rows=1, max_kv_len=most)
            assert torch.equal(alone[0], together[row]), row


def test_padding_touches_nothing():
    batch = Batch([(2, 20), (0, 1 << 20), (3, 9), (0, 0)], padding_rows=3)
    batch.starts[1], batch.starts[3] = 1 << 30, -5
    before = torch.full_like(batch.query, 7.0)
    out = before.clone().to(DEVICE)
    got = batch.run(out=out, max_num_rows=17, max_kv_len=SPLIT + 1)
    assert torch.equal(got[5:], before[5:])
    torch.testing.assert_close(got[:5], batch.expected()[:5], atol=2e-5, rtol=2e-5)
    assert torch.equal(batch.run()[5:], torch.zeros_like(before[5:]))


@pytest.mark.parametrize("spans", [[], [(0, 0)], [(0, 7), (0, 0)]], ids=str)
def test_nothing_to_do(spans):
    batch = Batch(spans, padding_rows=2)
    assert torch.equal(batch.run(), torch.zeros_like(batch.query))


def test_strided_operands():
    batch = Batch([(3, 50), (2, 18)])
    expected = batch.run()
    wide = torch.full((5, 9, 16), math.nan, device=DEVICE)  # made there: a copy to a device would lay it out anew
    wide[:, 2:6] = batch.query
    layers = torch.full((batch.cache.shape[0], 3, 2, 2, 16), math.nan, device=DEVICE)
    layers[:, 1] = batch.cache
    out = torch.zeros(5, 4, 48, device=DEVICE)[:, :, 16:32]
    batch.query, batch.cache = wide[:, 2:6], layers[:, 1]
    assert not batch.operands()[0].is_contiguous()
    assert torch.equal(batch.run(), expected)
    assert torch.equal(batch.run(out=out), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4, 8)}, "cache"),
        ({"query": torch.zeros(5, 3, 16)}, "multiple of 2"),
        ({"query": torch.zeros(5, 4, 16, dtype=torch.bfloat16)}, "one type"),
        ({"query": torch.zeros(5, 4, 32, device=DEVICE)[..., ::2]}, "contiguous"),
        ({"starts": torch.zeros(3, dtype=torch.int32)}, "spans"),
        ({"page_size": 0}, "page_size"),
        ({"window": 0}, "window"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"out": torch.zeros(4, 4, 16)}, "out"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    batch = Batch([(3, 50), (2, 18)])
    options = {key: change[key].to(DEVICE) for key in ("sinks", "out") if key in change}
    if "window" in change:
        options["window"] = change["window"]
    for key in ("query", "starts", "page_size"):
        setattr(batch, key, change.get(key, getattr(batch, key)))
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        batch.run(**options)
