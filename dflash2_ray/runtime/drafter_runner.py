"""The drafter's side of the port: contexts by request, messages applied in order, proposals for whoever is up to date.

The same runner serves every placement; `ColocatedDraftPort` is the in-process transport. Rows become context only when a
commit names them; anything stale, doubled or out of place is dropped and counted, and a request whose rows have a gap is
never drafted for. It must not know the target.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Proposal, Rows, Wanted
from dflash2_ray.core.ledger import Ledger
from dflash2_ray.models.context_pages import PagedContext
from dflash2_ray.models.dflash2 import GREEDY_BELOW, Drafter, draw_rules
from dflash2_ray.models.draft_context import DraftContext, append_all
from dflash2_ray.runtime.cuda_graphs import GraphPool
from dflash2_ray.runtime.draft_rounds import MOST_NEW_ROWS, Block, DraftRounds, NewRows
from dflash2_ray.runtime.pending_rows import take_committed
from dflash2_ray.sampling.noise import Purpose, uniforms
from dflash2_ray.sampling.token_noise import exponentials


@dataclass(slots=True, eq=False)
class _Drafted:
    """A request as the drafter sees it. `pending`: rows that no commit has named yet, by first position."""

    epoch: int
    temperature: float
    seed: int
    matching: bool
    context: DraftContext | PagedContext
    anchor: int | None = None
    base_len: int = 0
    broken: bool = False
    pending: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class DrafterRunner:
    """Applies messages and drafts. Not thread-safe. rounds: for a device with kernels; None keeps one buffer per request."""

    def __init__(self, drafter: Drafter, *, max_num_requests: int, rounds: DraftRounds | None = None) -> None:
        self.drafter = drafter
        self.rounds = rounds
        self.counters: Counter[str] = Counter()
        self._max_num_requests = max_num_requests
        self._requests: dict[str, _Drafted] = {}
        self._new: list[NewRows] = []  # rows that the next round takes in

    def apply(self, messages: Sequence[Open | Rows | Commit | Close]) -> None:
        """Apply messages in order; context of all commits is computed in one pass. Never raises for a stale message."""
        ready: list[tuple[_Drafted, int, torch.Tensor]] = []
        for message in messages:
            if isinstance(message, Open):
                self._open(message)
            elif isinstance(message, Rows):
                self._take_rows(message)
            elif isinstance(message, Commit):
                self._commit(message, ready)
            else:
                self._close(message)
        self._extend(ready)

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Proposals for every wanted request whose context reaches exactly its base length."""
        by_width: dict[int, list[tuple[Wanted, _Drafted]]] = {}
        for want in wanted:
            request = self._current(want.request_id, want.epoch)
            if request is None:
                continue
            if request.broken:
                self.counters["missing_rows"] += 1
            elif request.base_len != want.base_len or request.anchor is None:
                self.counters["stale_base"] += 1
            else:
                by_width.setdefault(want.width, []).append((want, request))
        if self.rounds is not None:
            return self._draft_round(self.rounds, [one for group in by_width.values() for one in group])
        return [proposal for width, group in by_width.items() for proposal in self._draft(width, group)]

    @property
    def num_requests(self) -> int:
        """Requests that hold a context."""
        return len(self._requests)

    def close(self) -> None:
        """Drop every context."""
        for request in self._requests.values():
            self._drop(request)
        self._requests.clear()

    # ---- messages -----------------------------------------------------------------------------------------------

    def _open(self, message: Open) -> None:
        known = self._requests.get(message.request_id)
        if known is not None and known.epoch >= message.epoch:
            self.counters["duplicate_open" if known.epoch == message.epoch else "stale_epoch"] += 1
            return
        if known is None and len(self._requests) >= self._max_num_requests:
            self.counters["too_many_requests"] += 1
            return
        if known is not None:
            self._drop(known)
        first = message.first_position
        context = self.drafter.new_context(first) if self.rounds is None else PagedContext(self.rounds.pages, first)
        self._requests[message.request_id] = _Drafted(
            message.epoch, message.temperature, message.seed, message.matching, context, base_len=first
        )

    def _take_rows(self, message: Rows) -> None:
        for span, rows in zip(
            message.spans, message.rows.split([span.num_rows for span in message.spans]), strict=True
        ):
            request = self._current(span.request_id, span.epoch)
            if request is None:
                continue
            if span.first_position < request.base_len:  # sent again: what lies behind base_len may be rejected tokens
                self.counters["stale_rows"] += 1
                continue
            request.pending.append((span.first_position, rows))

    def _commit(self, message: Commit, ready: list[tuple[_Drafted, int, torch.Tensor]]) -> None:
        request = self._current(message.request_id, message.epoch)
        if request is None:
            return
        if message.base_len <= request.base_len:
            self.counters["stale_base"] += 1
            return
        pieces, reached = take_committed(request.pending, request.base_len, message.base_len)
        request.pending = []  # what lies at or beyond base_len is void
        if reached < message.base_len and not request.broken:
            request.broken = True
            self.counters["missing_rows"] += 1
        if request.broken:
            return
        if isinstance(request.context, PagedContext) and not request.context.reserve(message.base_len):
            request.broken = True
            self.counters["no_room"] += 1
            return
        ready.append((request, request.base_len, torch.cat(pieces) if len(pieces) > 1 else pieces[0]))
        request.base_len, request.anchor = message.base_len, message.anchor

    def _close(self, message: Close) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.epoch > message.epoch:
            self.counters["stale_epoch" if request else "unknown_request"] += 1
            return
        self._drop(request)
        del self._requests[message.request_id]

    def _drop(self, request: _Drafted) -> None:
        """Give back what a request holds, also if a commit of the same messages is still to be taken in."""
        request.broken = True
        if isinstance(request.context, PagedContext):
            self._new = [one for one in self._new if one.context is not request.context]
            request.context.release()

    def _current(self, request_id: str, epoch: int) -> _Drafted | None:
        request = self._requests.get(request_id)
        if request is None:
            self.counters["unknown_request"] += 1
            return None
        if request.epoch != epoch:
            self.counters["stale_epoch"] += 1
            return None
        return request

    def _extend(self, ready: Sequence[tuple[_Drafted, int, torch.Tensor]]) -> None:
        if not ready:
            return
        if self.rounds is not None:
            self._take_in(self.rounds, ready)
            return
        device = self.drafter.device  # rows come from wherever the target is: over a socket they lie in host memory
        rows = (ready[0][2] if len(ready) == 1 else torch.cat([piece for _, _, piece in ready])).to(device)
        counts = [piece.shape[0] for _, _, piece in ready]
        stops = [first + count for (_, first, _), count in zip(ready, counts, strict=True)]
        offsets = np.array(stops) - np.cumsum(counts)  # from a row's place in the batch to its position
        positions = torch.from_numpy(np.arange(rows.shape[0]) + np.repeat(offsets, counts)).to(device)
        kv = self.drafter.context_kv(rows, positions, max(stops))
        append_all([request.context for request, _, _ in ready], kv, counts)  # type: ignore[misc]

    def _take_in(self, rounds: DraftRounds, ready: Sequence[tuple[_Drafted, int, torch.Tensor]]) -> None:
        """Leave the rows to the next round, if they are as few as those of a step; prompts are taken in at once."""
        for request, first, rows in ready:
            if request.broken:
                continue
            assert isinstance(request.context, PagedContext), "rounds have paged contexts"
            self._new.append(NewRows(request.context, first, rows))
            request.context.num_committed = first + rows.shape[0]
        if sum(one.rows.shape[0] for one in self._new) > MOST_NEW_ROWS:
            rounds.ingest(self._new)
            self._new = []

    # ---- drafting -----------------------------------------------------------------------------------------------

    def _draft(self, width: int, group: Sequence[tuple[Wanted, _Drafted]]) -> list[Proposal]:
        requests = [request for _, request in group]
        temperatures = [request.temperature for request in requests]
        sampled = [request.temperature >= GREEDY_BELOW and not request.matching for request in requests]
        noise = None
        if any(sampled):
            noise = uniforms(*_draws(group, width), Purpose.DRAFT).view(len(group), width)

        def token_noise(ids: torch.Tensor) -> torch.Tensor:
            racing = [one for one in group if one[1].matching and one[1].temperature >= GREEDY_BELOW]
            return exponentials(*_draws(racing, width), ids.flatten(0, 1)).view(ids.shape)

        anchors = [request.anchor for request in requests if request.anchor is not None]
        draft = self.drafter.draft(
            anchors,
            [request.context for request in requests],  # type: ignore[misc]
            width,
            temperatures,
            noise,
            [request.matching for request in requests],
            token_noise,
        )
        proposals = []
        for r, (want, _) in enumerate(group):
            ids = probs = None
            if sampled[r] and draft.candidate_ids is not None and draft.candidate_probs is not None:
                ids, probs = draft.candidate_ids[r], draft.candidate_probs[r]
            proposals.append(
                Proposal(want.request_id, want.epoch, want.base_len, tuple(draft.token_ids[r]), ids, probs)
            )
        return proposals

    def _draft_round(self, rounds: DraftRounds, group: Sequence[tuple[Wanted, _Drafted]]) -> list[Proposal]:
        """All widths in one round."""
        roomy: list[Wanted] = []
        blocks: list[Block] = []
        for want, request in group:
            assert isinstance(request.context, PagedContext), "rounds have paged contexts"
            assert request.anchor is not None, "a request without an anchor is not drafted for"
            if not request.context.reserve(request.base_len + want.width + 1):
                self.counters["no_room"] += 1
                continue
            roomy.append(want)
            (rule,) = draw_rules([request.temperature], [request.matching])
            blocks.append(Block(request.context, request.anchor, want.width, rule, request.temperature, request.seed))
        if not blocks:
            return []
        new, self._new = self._new, []
        return [
            Proposal(want.request_id, want.epoch, want.base_len, one.token_ids, one.candidate_ids, one.candidate_probs)
            for want, one in zip(roomy, rounds.draft(new, blocks), strict=True)
        ]


def _draws(group: Sequence[tuple[Wanted, _Drafted]], width: int) -> tuple[list[int], list[int]]:
    """(seeds, positions) of every slot of a group, request by request."""
    seeds = [request.seed for _, request in group for _ in range(width)]
    return seeds, [want.base_len + slot for want, _ in group for slot in range(1, width + 1)]


class ColocatedDraftPort:
    """`DraftPort` in one process: messages are applied where they are sent."""

    connected = True
    last_transfer_s = 0.0

    def __init__(self, runner: DrafterRunner) -> None:
        self.runner = runner
        self.ledger = Ledger()

    @property
    def graphs(self) -> GraphPool[Any] | None:
        return None if self.runner.rounds is None else self.runner.rounds.graphs

    def send(self, messages: Sequence[Open | Rows | Commit | Close]) -> None:
        self.runner.apply(messages)

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """Nothing to do ahead: this process has one thread for both models."""

    def collect(self, wanted: Sequence[Wanted], deadline_s: float | None = None) -> list[Proposal]:
        started = time.perf_counter()
        proposals = self.runner.propose(wanted)
        self.ledger.observe("draft_s", time.perf_counter() - started)
        return proposals

    def counters(self) -> dict[str, int]:
        return dict(self.runner.counters)

    def close(self) -> None:
        self.runner.close()
