"""What paged kernels are handed: the numbers of every span, each table from an address on that Triton need not compile anew for."""

import pytest
import torch

from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.paged_plan import plan_pages


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64])
def test_tables_are_whole_and_aligned(count):
    spans = tuple(Span(3 * index, 3, 20 + index, tuple(range(index, index + 6 + index // 8))) for index in range(count))
    plan = plan_pages(
        AttentionBatch(torch.zeros(3 * count, dtype=torch.int64), (*spans, Span(3 * count, 40, 40, (1, 2, 3, 4, 5))), 8)
    )
    short, long = plan.launches
    for index, span in enumerate(spans):
        assert (short.row_starts[index], short.num_rows[index], short.kv_lens[index]) == (
            span.row_start,
            span.num_rows,
            span.kv_len,
        )
        used = -(-span.kv_len // 8)
        assert short.page_table[index, :used].tolist() == list(span.page_ids[:used])
        assert not short.page_table[index, used:].any()
    assert (long.num_rows.tolist(), long.page_table.tolist(), long.max_kv_len) == ([40], [[1, 2, 3, 4, 5]], 40)
    for one in (short, long):
        tensors = (one.row_starts, one.num_rows, one.kv_lens, one.page_table)
        assert {tensor.storage_offset() % 4 for tensor in tensors} == {0}
