"""A target divided over ranks: which slice of each weight a rank holds, and where the partial results are added up.

Slices follow the `base_model_tp_plan` of the transformers config: `colwise` linears keep rows of their weight, `rowwise` ones
keep columns and their outputs are summed over the ranks; everything else is kept whole. Key/value heads fewer than ranks are
replicated. Embedding and head are divided by vocabulary. It must not know how ranks talk to each other.

Shapes: T rows, V vocabulary, K KV heads, D head size.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash2_ray.errors import CheckpointError

_REPLICATED = {"replicated_with_grad_allreduce", "replicate"}


class Collectives(Protocol):
    """What a rank needs of the others. Every rank calls the same methods in the same order with the same shapes. `device`:
    where their tensors lie."""

    device: str

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, the same bits on every rank, each element's independent of the tensor's size."""
        ...

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Every rank's x [T, widths[rank]] side by side on rank 0; None on the others."""
        ...


@dataclass(frozen=True)
class Shard:
    """One rank's part. `collectives` is None for a single rank."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Partial results summed over the ranks."""
        return x if self.collectives is None else self.collectives.sum_over_ranks(x)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in order of ranks: for decisions that must be one for all."""
        if self.collectives is None:
            return [list(values)]
        table = torch.zeros(self.size, len(values), dtype=torch.int64, device=self.collectives.device)
        table[self.rank] = torch.tensor(values, dtype=torch.int64)
        return [list(map(int, row)) for row in self.total(table).tolist()]

    def vocabulary(self, vocab_size: int) -> slice:
        """This rank's token ids; any vocabulary size: the last ranks may hold fewer, or none."""
        each = -(-vocab_size // self.size)
        return slice(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))

    def vocabulary_widths(self, vocab_size: int) -> list[int]:
        """How many ids every rank holds."""
        parts = [Shard(rank, self.size).vocabulary(vocab_size) for rank in range(self.size)]
        return [part.stop - part.start for part in parts]


@dataclass(frozen=True)
class WeightSlice:
    """What a rank reads of one tensor. None: all rows, or columns. zero: nothing, the tensor counts on rank 0 only."""

    rows: slice | None = None
    columns: slice | None = None
    zero: bool = False

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """The slice's own shape."""
        sizes = list(full)
        for axis, part in enumerate((self.rows, self.columns)):
            if part is not None:
                sizes[axis] = part.stop - part.start
        return tuple(sizes)


class LayerPlan:
    """Slices of a layer's tensors on one rank. Raises CheckpointError for what cannot be divided."""

    def __init__(self, plan: Mapping[str, str] | None, shard: Shard, num_kv_heads: int, head_dim: int) -> None:
        if shard.size > 1 and not plan:
            raise CheckpointError(
                "target: expected a model with a base_model_tp_plan for several ranks, got one without"
            )
        self._plan = {key.removeprefix("layers.*."): style for key, style in (plan or {}).items()}
        self._shard = shard
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim

    def style(self, module: str) -> str | None:
        """`colwise`, `rowwise`, or None for a module that every rank holds whole."""
        for pattern, style in self._plan.items():
            if fnmatch.fnmatchcase(module, pattern):
                if style in ("colwise", "rowwise"):
                    return style
                if style not in _REPLICATED and self._shard.size > 1:
                    raise CheckpointError(
                        f"target: {module} is to be divided as {style!r}; expected colwise or rowwise"
                    )
        return None

    def part(self, name: str, full: Sequence[int]) -> WeightSlice:
        """What to read of `module.weight` or `module.bias` of the given full shape."""
        module, _, kind = name.rpartition(".")
        style = self.style(module)
        if self._shard.size == 1 or style is None:
            return WeightSlice()
        if style == "colwise":
            return WeightSlice(rows=self._rows(name, full[0]))
        if kind == "bias":
            return WeightSlice(zero=self._shard.rank > 0)
        return WeightSlice(columns=self._even(name, full[1]))

    def _rows(self, name: str, count: int) -> slice:
        replicated = self._shard.size > self._num_kv_heads and count == self._num_kv_heads * self._head_dim
        if replicated and name.rpartition(".")[0].endswith(("k_proj", "v_proj")):
            head = self._shard.rank * self._num_kv_heads // self._shard.size
            return slice(head * self._head_dim, (head + 1) * self._head_dim)
        return self._even(name, count)

    def _even(self, name: str, count: int) -> slice:
        if count % self._shard.size:
            raise CheckpointError(
                f"target: {name}: {self._shard.size} ranks cannot share {count} rows or columns evenly; "
                "expected tensor_parallel_size to divide it"
            )
        each = count // self._shard.size
        return slice(self._shard.rank * each, (self._shard.rank + 1) * each)


def embed(ids: torch.Tensor, table: torch.Tensor, part: slice, shard: Shard) -> torch.Tensor:
    """Rows of a table divided by vocabulary: ids [T] → [T, H]; `table` holds the ids of `part`."""
    if shard.size == 1:
        return torch.nn.functional.embedding(ids, table)
    local = ids - part.start
    foreign = (local < 0) | (local >= table.shape[0])
    if table.shape[0] == 0:
        return shard.total(table.new_zeros(ids.shape[0], table.shape[1]))
    rows = torch.nn.functional.embedding(local.masked_fill(foreign, 0), table)
    return shard.total(rows.masked_fill_(foreign[:, None], 0))


def assign(module: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Put tensors into a module built without memory, also where a rank's slice has another shape than the whole."""
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        home = module.get_submodule(owner)
        if leaf in home._parameters:
            home._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        else:
            home._buffers[leaf] = value
