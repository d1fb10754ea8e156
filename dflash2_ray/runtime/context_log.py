"""What a new drafter must be told about the requests that are open: their Open, all committed context rows, length and anchor.

It follows the same messages, by the same rules, as the drafter itself (`drafter_runner`), and computes nothing. Rows are kept
in CPU memory: hidden size × item size bytes per token of every open request. It must not know models or transports.

Shapes: n rows, H hidden.
"""

from collections.abc import Iterator, Sequence

import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Rows
from dflash2_ray.runtime.pending_rows import take_committed

_GROWTH = 128  # rows


class LoggedRequest:
    """One open request. pending: rows that no commit has named yet, by first position. broken: a row is missing for good."""

    def __init__(self, opened: Open) -> None:
        self.opened = opened
        self.base_len = opened.first_position
        self.anchor: int | None = None
        self.broken = False
        self.pending: list[tuple[int, torch.Tensor]] = []
        self._rows = torch.empty(0, 0)

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """Committed rows [stop - first, H]; their memory never changes."""
        begin = self.opened.first_position
        return self._rows[first - begin : stop - begin]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 before the first."""
        return self._rows.shape[1] * self._rows.element_size()

    def commit(self, base_len: int, anchor: int | None) -> None:
        """Take what `pending` holds up to `base_len`; a stale commit changes nothing."""
        if base_len <= self.base_len:
            return
        pieces, reached = take_committed(self.pending, self.base_len, base_len)
        self.pending = []
        if reached < base_len:
            self.broken = True
            self._rows = torch.empty(0, 0)  # nobody will ask for them
        if self.broken:
            return
        for piece in pieces:
            self._append(piece)
        self.anchor = anchor

    @torch.inference_mode()
    def _append(self, piece: torch.Tensor) -> None:
        held = self.base_len - self.opened.first_position
        needed = held + piece.shape[0]
        if needed > self._rows.shape[0]:
            grown = piece.new_empty(needed + max(_GROWTH, needed // 4), piece.shape[1])
            if held:
                grown[:held] = self._rows[:held]
            self._rows = grown
        self._rows[held:needed] = piece
        self.base_len += piece.shape[0]


class ContextLog:
    """Open requests by id."""

    def __init__(self) -> None:
        self._requests: dict[str, LoggedRequest] = {}

    def apply(self, messages: Sequence[Open | Rows | Commit | Close]) -> None:
        """Follow messages in order; rows are CPU tensors. Never raises for a stale message."""
        for message in messages:
            if isinstance(message, Rows):
                self._take_rows(message)
                continue
            known = self._requests.get(message.request_id)
            if isinstance(message, Open):
                if known is None or known.opened.epoch < message.epoch:
                    self._requests[message.request_id] = LoggedRequest(message)
            elif known is None:
                continue
            elif isinstance(message, Commit):
                if known.opened.epoch == message.epoch:
                    known.commit(message.base_len, message.anchor)
            elif known.opened.epoch <= message.epoch:
                del self._requests[message.request_id]

    def _take_rows(self, message: Rows) -> None:
        offset = 0
        for span in message.spans:
            rows = message.rows[offset : offset + span.num_rows]
            offset += span.num_rows
            known = self._requests.get(span.request_id)
            if known is not None and known.opened.epoch == span.epoch and span.first_position >= known.base_len:
                known.pending.append((span.first_position, rows))

    def get(self, request_id: str) -> LoggedRequest | None:
        """None for a request that is not open."""
        return self._requests.get(request_id)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._requests))

    def clear(self) -> None:
        """Forget every request."""
        self._requests.clear()
