"""Tensors by name from the safetensors files of a checkpoint folder, sharded or not, without reading what is not asked for."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash2_ray.errors import CheckpointError

_TYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}


class TensorFiles:
    """`shapes`: name → shape, from the headers. Raises CheckpointError for missing or damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.num_bytes = 0
        self._homes: dict[str, Path] = {}
        for path in self._paths():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        part = file.get_slice(name)
                        self.shapes[name] = tuple(part.get_shape())
                        count = 1
                        for size in part.get_shape():
                            count *= size
                        self.num_bytes += count * _TYPES.get(str(part.get_dtype()), 2)
                        self._homes[name] = path
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None
        self._check_index()

    def _paths(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, OSError) as error:
                raise CheckpointError(f"{index}: not a readable weight index: {error}") from None
            paths = [self.folder / name for name in names]
        elif (self.folder / "model.safetensors").is_file():
            paths = [self.folder / "model.safetensors"]
        else:
            paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder}: expected *.safetensors weights, got none")
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{self.folder}: the weight index names {path.name}, but there is no such file")
        return paths

    def _check_index(self) -> None:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
                if name not in self.shapes:
                    raise CheckpointError(
                        f"{self.folder}: the weight index places {name} in {file}, but it is not there"
                    )

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        """One tensor, or a range of its rows and columns (nothing else is read), in its stored dtype. `shape`: what the whole
        must be. Raises CheckpointError."""
        if name not in self._homes:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing" + (f"; expected shape {list(shape)}" if shape else "")
            )
        if shape is not None and self.shapes[name] != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: tensor {name}: expected shape {list(shape)}, got {list(self.shapes[name])}"
            )
        with safe_open(self._homes[name], framework="pt") as file:
            if rows is None and columns is None:
                return file.get_tensor(name)
            part = file.get_slice(name)
            return part[rows or slice(None)] if columns is None else part[rows or slice(None), columns]
