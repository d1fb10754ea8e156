"""Columns of numbers in one tensor on the device, whose addresses never change: what a captured graph reads.

All are replaced together, by one copy. They must not know what they mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash2_ray.models.upload import ready_to_leave

_ALIGNMENT = 16  # bytes, as kernels expect


@dataclass(frozen=True)
class Column:
    """shape: of the whole. kind: of numpy and torch alike. padding: what stands where nothing was filled in."""

    shape: tuple[int, ...]
    kind: str = "int64"
    padding: int = 0


class StaticInputs:
    """tensors: the columns on the device, by name."""

    def __init__(self, columns: Mapping[str, Column], device: str) -> None:
        self._columns = dict(columns)
        self._starts: dict[str, int] = {}
        size = 0
        for name, column in columns.items():
            self._starts[name] = size
            size += -(-_num_bytes(column) // _ALIGNMENT) * _ALIGNMENT
        self._size = size
        self._whole = torch.zeros(size, dtype=torch.uint8, device=device)
        self._device = device
        self.tensors = {name: self._part(name) for name in columns}

    def fill(self, values: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        """Replace every column: its first numbers, or for a table the first numbers of its rows; padding behind them. None is left out."""
        host = np.zeros(self._size, dtype=np.uint8)
        for name, column in self._columns.items():
            start = self._starts[name]
            array = host[start : start + _num_bytes(column)].view(column.kind).reshape(column.shape)
            if column.padding:
                array.fill(column.padding)
            own = values[name]
            if len(column.shape) == 1:
                array[: len(own)] = own
            else:
                for row, numbers in zip(array, own, strict=False):
                    row[: len(numbers)] = numbers
        self._whole.copy_(ready_to_leave(torch.from_numpy(host), self._device), non_blocking=True)

    def _part(self, name: str) -> torch.Tensor:
        column, start = self._columns[name], self._starts[name]
        return self._whole[start : start + _num_bytes(column)].view(getattr(torch, column.kind)).view(column.shape)


def _num_bytes(column: Column) -> int:
    return int(np.prod(column.shape)) * np.dtype(column.kind).itemsize
