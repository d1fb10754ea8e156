"""Tensors between a target and its drafter through `torch.distributed`, beside the framed channel.

Two members, a group of its own: neither the default group nor a target's group knows of it, so a drafter that dies cannot
poison either. A tensor is announced on the channel first; the receiver asks for it only then, so a peer that is missing is
found on the channel, and a peer that hangs by the group's timeout. The group's store has no password: use it inside a
trusted network only. It must not know messages.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import distributed

from dflash2_ray.errors import ConfigError
from dflash2_ray.runtime.process_group import new_group

Transport = Literal["socket", "gloo", "nccl"]
TRANSPORTS: tuple[str, ...] = ("socket", "gloo", "nccl")
TARGET_RANK, DRAFTER_RANK = 0, 1
_NEVER_SENT = 1  # a tag; tensors have 0


class TensorLane(Protocol):
    """One direction of tensors. `device`: where they must lie, and where received ones arrive."""

    device: str

    def send(self, tensor: torch.Tensor) -> None:
        """Blocks until the tensor is on its way out of this process' hands. Raises RuntimeError."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next announced tensor. Raises RuntimeError when the peer is gone or the timeout has passed."""
        ...

    def close(self) -> None:
        """End a transfer that waits, from another thread; the lane is not used afterwards."""
        ...


class GroupLane:
    """A lane over a process group of two: `gloo` for CPU tensors, `nccl` for those of this process' current GPU.

    The NCCL path is the same code with another backend; it needs two GPUs and has not been run on the machines of this
    project. Its transfers run on a stream of their own, so that a peer that hangs never blocks the model's stream.
    """

    def __init__(
        self, transport: str, store: distributed.Store, *, rank: int, host: str, timeout_s: float, name: str
    ) -> None:
        """Blocks until both members are there. host: this machine's address towards the other. Raises RuntimeError."""
        self.device = "cuda" if transport == "nccl" else "cpu"
        self._peer = 1 - rank
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()  # between `close` and the beginning of a transfer
        self._closed = False
        self._waiting = False
        self._store = store  # the target's must live as long as the group
        self._stream = torch.cuda.Stream() if self.device == "cuda" else None
        self._group = new_group(transport, distributed.PrefixStore(name, store), rank, 2, host, timeout_s)

    def send(self, tensor: torch.Tensor) -> None:
        self._transfer(lambda: self._group.send([tensor], self._peer, 0))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._transfer(lambda: self._group.recv([tensor], self._peer, 0))
        return tensor

    def _transfer(self, begin: Callable[[], Any]) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(self._stream):
                begin().wait()
            self._stream.synchronize()
            return
        with self._lock:
            if self._closed:
                raise RuntimeError("the tensor lane is closed")
            work = begin()
            self._waiting = True
        try:
            work.wait(self._timeout)
        finally:
            self._waiting = False

    def close(self) -> None:
        """gloo cannot cancel a transfer, but a wait that runs out of time closes the connection for all who wait."""
        with self._lock:
            if self._closed or not self._waiting:
                self._closed = True
                return
            self._closed = True
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], self._peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def check_transport(transport: str) -> None:
    """Raises ConfigError for a transport that is unknown or that this build of torch lacks."""
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if transport == "gloo" and not distributed.is_gloo_available():
        raise ConfigError("transport: `gloo` was asked for, but this build of torch has none; use socket")
    if transport == "nccl" and not (distributed.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError("transport: `nccl` was asked for, but this process has no GPU or no NCCL; use socket")
