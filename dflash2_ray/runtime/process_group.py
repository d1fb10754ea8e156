"""Process groups of our own: the target's ranks here, and any other that needs one. Never the default group of the process, so
that one generation, or one group's dead member, cannot touch another.

Gloo on CPUs, NCCL on GPUs, always with an explicit timeout. The interface is the one that carries the given address of this
machine: gloo would take the host name's, which often is the loopback. It must not know models or steps.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from dflash2_ray.errors import UnitLost


def host_store(host: str, num_members: int, timeout_s: float) -> distributed.TCPStore:
    """The meeting point, on a free port (`store.port`); it must live as long as its groups."""
    return distributed.TCPStore(host, 0, num_members, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, num_members: int, timeout_s: float) -> distributed.TCPStore:
    """The other members' side of it. Raises RuntimeError when it cannot be reached."""
    return distributed.TCPStore(host, port, num_members, False, timedelta(seconds=timeout_s), wait_for_workers=False)


def new_group(backend: str, store: distributed.Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """A group of `size` members; blocks until all are there. `host`: this machine's address towards the others; backend:
    `gloo` or `nccl`. Raises RuntimeError."""
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs do not know it
    gloo._timeout = timeout
    gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, size, gloo)


class RankGroupLink:
    """The collectives of one target rank (`models.tensor_parallel.Collectives`). A peer that died raises UnitLost at once, one
    that hangs at the timeout."""

    def __init__(
        self,
        store: distributed.Store,
        *,
        rank: int,
        size: int,
        host: str,
        device: str,
        generation: int,
        timeout_s: float,
    ) -> None:
        """Blocks until every rank of this generation is there. Raises UnitLost."""
        self.rank, self.size, self.device = rank, size, device
        self._store = store
        self._on_gpu = device != "cpu"
        self._timeout = timedelta(seconds=timeout_s)
        own = distributed.PrefixStore(f"ranks-{generation}", store)
        try:
            self._group = new_group("nccl" if self._on_gpu else "gloo", own, rank, size, host, timeout_s)
        except RuntimeError as error:
            raise UnitLost(f"target rank {rank}: the group of {size} ranks did not come together: {error}") from None

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """See the protocol. On a CPU the parts are gathered and added in rank order: gloo's all-reduce adds in an order that
        depends on where an element lies in the buffer, and so on how many rows share the batch, and it is slower (568 against
        367 µs for 2 rows of 576, 1486 against 636 for 64). NCCL's order is its own: bit-equality over batch shapes is not
        promised there."""
        x = x.contiguous()
        if self._on_gpu:
            self._wait(lambda: self._group.allreduce([x]))
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [x]))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """See the protocol. Parts are padded to the widest: the members of a gather send equal shapes."""
        widest = max(widths)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        if self._on_gpu:
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            self._wait(lambda: self._group.allgather([parts], [padded]))
        else:
            options = distributed.GatherOptions()
            options.rootRank = 0
            parts = [torch.empty_like(padded) for _ in range(self.size if self.rank == 0 else 0)]
            self._wait(lambda: self._group.gather([parts] if parts else [], [padded], options))
        if self.rank != 0:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _wait(self, start: Any) -> None:
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            raise UnitLost(f"target rank {self.rank}: a collective of {self.size} ranks failed: {error}") from None
