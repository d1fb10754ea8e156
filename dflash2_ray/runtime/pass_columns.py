"""What every captured pass reads of its rows and requests: the columns, and the launch of attention that they stand for.

Rows without a slot and requests without rows fill a bucket up; kernels neither read nor write for them. It must not know models.
"""

from collections.abc import Mapping

import torch

from dflash2_ray.models.paged_plan import Launch
from dflash2_ray.runtime.static_inputs import Column


def pass_columns(num_requests: int, num_rows: int, reach: int, page_size: int) -> dict[str, Column]:
    """token_ids, positions, slots [num_rows]; row_starts, num_rows, kv_lens [num_requests]; page_table [num_requests, pages of `reach`
    positions]."""
    rows, requests = (num_rows,), (num_requests,)
    return {
        "token_ids": Column(rows), "positions": Column(rows), "slots": Column(rows, padding=-1),
        "row_starts": Column(requests, "int32"), "num_rows": Column(requests, "int32"), "kv_lens": Column(requests, "int32"),
        "page_table": Column((num_requests, -(-reach // page_size)), "int32"),
    }  # fmt: skip


def launch_of(tensors: Mapping[str, torch.Tensor], num_rows_each: int, reach: int) -> Launch:
    """Attention of requests with up to `num_rows_each` rows and `reach` positions, from those columns."""
    return Launch(
        tensors["row_starts"],
        tensors["num_rows"],
        tensors["kv_lens"],
        tensors["page_table"],
        max_num_rows=num_rows_each,
        max_kv_len=reach,
    )
