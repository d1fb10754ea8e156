"""The device on which this process's kernels run, and operands in layouts that kernels must bear."""

import pytest
import torch

from dflash2_kernels.triton_import import INTERPRETED


@pytest.fixture(scope="session")
def device():
    return "cpu" if INTERPRETED else "cuda"


def _every_second(one):
    big = torch.full([*one.shape[:-1], 2 * one.shape[-1]], 9.0, dtype=one.dtype, device=one.device)
    big[..., ::2] = one
    return big[..., ::2]


def _part_of_a_wider_one(one):
    big = torch.full([*one.shape[:-1], one.shape[-1] + 3], 9.0, dtype=one.dtype, device=one.device)
    big[..., 1:-2] = one
    return big[..., 1:-2]


def _reversed_order(one):
    order = list(reversed(range(one.dim())))
    return one.permute(order).contiguous().permute(order)


@pytest.fixture(params=[_every_second, _part_of_a_wider_one, _reversed_order], ids=lambda one: one.__name__[1:])
def strided(request):
    """A function that gives the same values in another layout."""
    return request.param
