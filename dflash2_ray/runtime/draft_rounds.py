"""The drafter's round on a device with kernels: new context rows in, block, head, walk; one launch where graphs are used.

Blocks of several widths share a round: the narrower ones have rows behind them that nothing attends to and no convolution looks ahead at, so
a draft never depends on how wide others are. The numbers go up in one copy; rows that stand for nobody have no slot, and requests no rows.
Without graphs, or for a round that no bucket holds, the same runs launch by launch at its own sizes. It must not know messages.
Shapes: R requests, B rows of the widest block, S = B - 1 slots, n context rows, H hidden, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash2_kernels.noise import wrapped
from dflash2_kernels.selector_walk import DRAW, PADDING
from dflash2_ray.models.context_pages import ContextPages, PagedContext
from dflash2_ray.models.dflash2 import GREEDY_BELOW, Drafter, PagedBlocks
from dflash2_ray.models.upload import upload
from dflash2_ray.runtime.cuda_graphs import MOST_ROWS, GraphBackend, GraphPool, Results, next_bucket, next_reach
from dflash2_ray.runtime.pass_columns import launch_of, pass_columns
from dflash2_ray.runtime.static_inputs import Column, StaticInputs

MOST_NEW_ROWS = 512  # context rows that may wait for a round


@dataclass(frozen=True, slots=True)
class _Size:
    """num_new_rows: context rows that come in. reach: positions of a request at most."""

    num_requests: int
    num_block_rows: int
    num_new_rows: int
    reach: int


@dataclass(frozen=True)
class NewRows:
    """Context rows [n, H] on their way in, for positions first, first + 1, … of one context."""

    context: PagedContext
    first: int
    rows: torch.Tensor


@dataclass(frozen=True)
class Block:
    """What one request drafts from: `width` tokens behind an anchor. rule: how it draws (`selector_walk`); seed: its 64-bit noise key. The
    context has room for the block."""

    context: PagedContext
    anchor: int
    width: int
    rule: int
    temperature: float
    seed: int

    @property
    def base(self) -> int:
        """The anchor's position."""
        return self.context.num_committed

    @property
    def stop(self) -> int:
        """The position behind the block."""
        return self.context.num_committed + self.width + 1


@dataclass(frozen=True)
class BlockDraft:
    """token_ids: as many as the block is wide; candidate_ids, candidate_probs [width, C]: of one that draws, what it drew from."""

    token_ids: tuple[int, ...]
    candidate_ids: torch.Tensor | None
    candidate_probs: torch.Tensor | None


class DraftRounds:
    """num_block_rows, num_positions: of a block, and of a context with its block, at most. backend: None for launch by launch."""

    def __init__(
        self,
        drafter: Drafter,
        pages: ContextPages,
        *,
        max_num_requests: int,
        num_block_rows: int,
        num_positions: int,
        backend: GraphBackend | None,
    ) -> None:
        self.graphs: GraphPool[_Size] | None = None if backend is None else GraphPool("draft", backend)
        self.pages = pages
        self._drafter = drafter
        self._max_num_requests = max_num_requests
        self._num_block_rows = num_block_rows
        self._num_positions = num_positions
        self._inputs: dict[_Size, tuple[StaticInputs, torch.Tensor]] = {}

    @torch.inference_mode()
    def ingest(self, new: Sequence[NewRows]) -> None:
        """Take context rows in by themselves."""
        rows = torch.cat([one.rows.to(self._drafter.device) for one in new])
        positions, slots = _places(new)
        numbers = upload(torch.tensor([positions, slots]), self._drafter.device)
        self._drafter.ingest(rows, numbers[0], max(positions) + 1, numbers[1], self.pages.rows)

    @torch.inference_mode()
    def draft(self, new: Sequence[NewRows], blocks: Sequence[Block]) -> list[BlockDraft]:
        """Take the rows in, then draft for every block."""
        num_rows = max(one.width for one in blocks) + 1
        num_positions = max(one.stop for one in blocks)
        size = self._bucket(len(blocks), num_rows, num_positions)
        if size is not None and sum(one.rows.shape[0] for one in new) > size.num_new_rows:
            self.ingest(new)
            new = []
        if size is None:
            size = _Size(len(blocks), num_rows, sum(one.rows.shape[0] for one in new), num_positions)
            inputs, rows = self._make_inputs(size)
            self._fill(inputs, rows, new, blocks, num_rows)
            results = self._launch(size, inputs.tensors, rows)
        else:
            assert self.graphs is not None, "buckets are of graphs"
            if size not in self._inputs:
                self._inputs[size] = self._make_inputs(size)
            inputs, rows = self._inputs[size]
            self._fill(inputs, rows, new, blocks, size.num_block_rows)
            results = self.graphs.run(size, lambda: self._launch(size, inputs.tensors, rows))
        tokens = results["token_ids"].tolist()
        if any(one.rule == DRAW for one in blocks):  # rows of their own: the next round writes these again
            results = {name: results[name].clone() for name in ("candidate_ids", "probs")}
        return [
            BlockDraft(
                tuple(own[: one.width]),
                results["candidate_ids"][r, : one.width] if one.rule == DRAW else None,
                results["probs"][r, : one.width] if one.rule == DRAW else None,
            )
            for r, (one, own) in enumerate(zip(blocks, tokens, strict=False))
        ]

    def _bucket(self, count: int, num_block_rows: int, num_positions: int) -> _Size | None:
        if self.graphs is None or self.graphs.failure is not None:
            return None
        num_requests = next_bucket(count, self._max_num_requests)
        num_rows = num_requests * (rows_each := next_bucket(num_block_rows, self._num_block_rows))
        if num_rows > MOST_ROWS or num_positions > self._num_positions or num_block_rows > rows_each:
            return None
        return _Size(num_requests, rows_each, num_rows, next_reach(num_positions, self._num_positions))

    def _make_inputs(self, size: _Size) -> tuple[StaticInputs, torch.Tensor]:
        drafter = self._drafter
        requests, new = (size.num_requests,), (size.num_new_rows,)
        columns = pass_columns(size.num_requests, size.num_requests * size.num_block_rows, size.reach, self.pages.page_size) | {
            "new_positions": Column(new), "new_slots": Column(new, padding=-1),
            "anchors": Column(requests), "seeds": Column(requests), "bases": Column(requests),
            "temperatures": Column(requests, "float32", padding=1), "rules": Column(requests, "int32", padding=PADDING),
        }  # fmt: skip
        rows = torch.zeros(
            size.num_new_rows, drafter.config.hidden_size, dtype=drafter.activations, device=drafter.device
        )
        return StaticInputs(columns, drafter.device), rows

    def _fill(
        self, inputs: StaticInputs, rows: torch.Tensor, new: Sequence[NewRows], blocks: Sequence[Block], num_rows: int
    ) -> None:
        start = 0
        for one in new:
            rows[start : start + one.rows.shape[0]] = one.rows
            start += one.rows.shape[0]
        new_positions, new_slots = _places(new)
        mask, page_size = self._drafter.config.mask_token_id, self.pages.page_size
        inputs.fill({
            "new_positions": new_positions, "new_slots": new_slots,
            "token_ids": [token for one in blocks for token in (one.anchor, *[mask] * (num_rows - 1))],
            "positions": [min(one.base + row, one.stop - 1) for one in blocks for row in range(num_rows)],
            "slots": [
                slot for one in blocks
                for slot in (*one.context.slots(one.base, one.stop), *[-1] * (num_rows - one.width - 1))
            ],
            "row_starts": range(0, len(blocks) * num_rows, num_rows), "num_rows": [one.width + 1 for one in blocks],
            "kv_lens": [one.stop for one in blocks],
            "page_table": [one.context.page_ids[: -(-one.stop // page_size)] for one in blocks],
            "anchors": [one.anchor for one in blocks], "bases": [one.base for one in blocks], "rules": [one.rule for one in blocks],
            "seeds": [wrapped(one.seed) for one in blocks],
            "temperatures": [max(one.temperature, GREEDY_BELOW) for one in blocks],
        })  # fmt: skip

    def _launch(self, size: _Size, inputs: dict[str, torch.Tensor], rows: torch.Tensor) -> Results:
        drafter = self._drafter
        num_positions = max(
            self._num_positions, size.reach
        )  # one table of rotations for every round: its address must not change
        if size.num_new_rows:
            drafter.ingest(rows, inputs["new_positions"], num_positions, inputs["new_slots"], self.pages.rows)
        blocks = PagedBlocks(self.pages, inputs["slots"], launch_of(inputs, size.num_block_rows, size.reach))
        ids = inputs["token_ids"].view(size.num_requests, size.num_block_rows)
        hidden = drafter.run_block(ids, inputs["positions"], num_positions, blocks)
        token_ids, candidate_ids, probs = drafter.walk(
            hidden, inputs["anchors"], inputs["temperatures"], inputs["rules"], inputs["seeds"], inputs["bases"]
        )
        return {"token_ids": token_ids, "candidate_ids": candidate_ids, "probs": probs}


def _places(new: Sequence[NewRows]) -> tuple[list[int], list[int]]:
    """Positions and slots of rows that come in."""
    positions: list[int] = []
    slots: list[int] = []
    for one in new:
        stop = one.first + one.rows.shape[0]
        positions.extend(range(one.first, stop))
        slots += one.context.slots(one.first, stop)
    return positions, slots
