"""Which implementation computes what in this engine: decided once by device, dtype and what is installed, and reported in `describe()`.

Names are those of `dflash2_kernels.catalogue`, and `linear` (`models.linear`). It must not know requests.
"""

import functools

import torch

from dflash2_kernels import catalogue
from dflash2_ray.models.attention import runs_by_row
from dflash2_ray.models.linear import PackedLinear

TORCH = "torch"  # the service computes it itself, the operator's kernel is not called
_OF_TARGET = ("add_rms_norm", "kv_store", "paged_attention", "sparse_rejection")
_OF_DRAFTER = ("grouped_conv", "vocab_topk", "selector_walk", "context_ingest")
_TILES, _ROWS = "torch, whole tiles", "avx512, row by row"  # `models.attention` where no kernel runs
_USUAL_HEAD_DIM = 64  # what is reported is true of the usual head sizes


@functools.cache
def _linear(device: str, dtype: str) -> str:
    """The back end of a weight that has no special values."""
    if device != "cpu":
        return "plain"
    return PackedLinear(torch.eye(16, dtype=getattr(torch, dtype))).backend


def report_operators(device: str, dtype: str, *, drafts: bool) -> dict[str, str]:
    """operator → implementation. drafts: whether there is a drafter. A separate drafter runs on the same kind of device."""
    chosen = catalogue.report(device)
    found = {"linear": _linear(device, dtype), **{name: chosen[name] for name in _OF_TARGET}}
    if chosen["paged_attention"] == "torch reference":
        found["paged_attention"] = _ROWS if runs_by_row(torch.device(device), _USUAL_HEAD_DIM) else _TILES
    if chosen["sparse_rejection"] == "torch reference":
        found["sparse_rejection"] = TORCH  # `sampling.rejection`
    if drafts:
        found |= {name: chosen[name] for name in _OF_DRAFTER}
        if chosen["context_ingest"] == "torch reference":
            found["context_ingest"] = TORCH  # `models.dflash2`
    return found
