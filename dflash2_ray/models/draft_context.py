"""Context keys and values of one request in the drafter: committed positions only, a windowed layer's window only.

Layers that keep the same range share a buffer. Behind the committed rows lies scratch space for the draft block, which the
rows of the next commit overwrite. It must not know requests or messages.

Shapes: L layers of a buffer, K KV heads, D head size, B block rows.
"""

from collections.abc import Sequence

import torch

_GROWTH = 128  # rows


class _Buffer:
    """[capacity, L, 2, K, D]: row i holds position `first + i`."""

    def __init__(
        self, window: int | None, num_layers: int, num_kv_heads: int, head_dim: int, like: torch.Tensor, first: int
    ) -> None:
        self.window = window
        self.first = first
        self.capacity = 0
        self.rows = like.new_empty(0, num_layers, 2, num_kv_heads, head_dim)

    def reserve(self, num_committed: int, stop: int) -> None:
        """Room for positions up to `stop - 1`; keeps the committed rows that a later block can still see."""
        if stop - self.first <= self.capacity:
            return
        keep = self.first if self.window is None else max(self.first, num_committed - self.window + 1)
        needed = stop - keep
        rows, kept = self.rows, self.rows[keep - self.first : num_committed - self.first]
        if needed > self.capacity or keep == self.first:
            self.capacity = needed + max(_GROWTH, needed // 4)
            rows = self.rows.new_empty(self.capacity, *self.rows.shape[1:])
        else:
            kept = kept.clone()  # it moves within its own memory
        rows[: num_committed - keep] = kept
        self.rows, self.first = rows, keep

    def place(self, rows: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows [n = count, L, 2, K, D] of the next n positions belong, and those of them that are to be kept; `start`: how
        many are committed."""
        stop = start + count
        if self.window is not None and count >= self.window:  # only the tail can ever be seen
            self.first = stop - self.window + 1
            rows, start = rows[self.first - start :], self.first
        self.reserve(start, stop)
        return self.rows[start - self.first : stop - self.first], rows


class DraftContext:
    """num_committed: positions first … num_committed - 1 are in. `windows[i]`: window of layer i, None for full attention."""

    def __init__(
        self, windows: Sequence[int | None], num_kv_heads: int, head_dim: int, like: torch.Tensor, first: int = 0
    ) -> None:
        assert first == 0 or None not in windows, "full attention needs every position"
        self.num_committed = first
        self._homes: list[tuple[_Buffer, int]] = []
        self._layers: dict[int | None, list[int]] = {}
        for index, window in enumerate(windows):
            self._layers.setdefault(window, []).append(index)
        buffers = {w: _Buffer(w, len(own), num_kv_heads, head_dim, like, first) for w, own in self._layers.items()}
        for window in windows:
            place = sum(home is buffers[window] for home, _ in self._homes)
            self._homes.append((buffers[window], place))
        self._buffers = buffers

    def append(self, rows: torch.Tensor) -> None:
        """Commit rows [n, layers, 2, K, D] for the next n positions (overwriting whatever a block left there)."""
        append_all([self], rows, [rows.shape[0]])

    @torch.inference_mode()
    def reserve_block(self, num_rows: int) -> None:
        """Scratch room for a draft block behind the committed rows."""
        for buffer in self._buffers.values():
            buffer.reserve(self.num_committed, self.num_committed + num_rows)

    @torch.inference_mode()
    def write_block(self, layer: int, rows: torch.Tensor) -> None:
        """A block's own keys and values [B, 2, K, D] of one layer, as scratch."""
        buffer, place = self._homes[layer]
        at = self.num_committed - buffer.first
        buffer.rows[at : at + rows.shape[0], place] = rows

    def view(self, layer: int, num_block_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(keys, values, first position): [n, K, D] each, context that the block's first row can see, then the block."""
        buffer, place = self._homes[layer]
        low = buffer.first
        if buffer.window is not None:
            low = max(low, self.num_committed - buffer.window + 1)
        rows = buffer.rows[low - buffer.first : self.num_committed + num_block_rows - buffer.first, place]
        return rows[:, 0], rows[:, 1], low

    @property
    def num_kept_rows(self) -> dict[int | None, int]:
        """Committed rows held, by window."""
        return {window: self.num_committed - buffer.first for window, buffer in self._buffers.items()}

    def places(self, rows: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Commit `count` rows, whose copying is left to the caller: (where, what), layers of one window at a time."""
        start = self.num_committed
        self.num_committed += count
        if len(self._buffers) == 1:
            return [buffer.place(rows, start, count) for buffer in self._buffers.values()]
        return [buffer.place(rows[:, self._layers[window]], start, count) for window, buffer in self._buffers.items()]


@torch.inference_mode()
def append_all(contexts: Sequence[DraftContext], rows: torch.Tensor, counts: list[int]) -> None:
    """Commit the next counts[i] rows of [sum of counts, layers, 2, K, D] to contexts[i]; all are copied by one call. A context that comes
    twice is given its first rows before its buffers may move."""
    if len(set(contexts)) < len(contexts) > 1:
        for context, own in zip(contexts, rows.split(counts), strict=True):
            context.append(own)
        return
    places = [
        place
        for context, own, count in zip(contexts, rows.split(counts), counts, strict=True)
        for place in context.places(own, count)
    ]
    torch._foreach_copy_([where for where, _ in places], [what for _, what in places])
