"""The serial step loop, the definition of correct: plan, draft, verify, commit, one step after the other.

Everything cleverer is tested against it token for token. It owns no thread: whoever holds it calls `step()`.
"""

import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from dflash2_ray.config import EngineConfig
from dflash2_ray.core.admission import check_spec
from dflash2_ray.core.draft_port import Close, Commit, DraftPort, Open, Proposal, Rows, RowSpan, Wanted, propose
from dflash2_ray.core.messages import RequestDelta, RequestSpec
from dflash2_ray.core.page_pool import PagePool
from dflash2_ray.core.request import Request
from dflash2_ray.core.scheduler import Outcome, Planned, Scheduler
from dflash2_ray.errors import InvalidRequest, UnitLost
from dflash2_ray.runtime.input_batch import InputBatch, build_input_batch
from dflash2_ray.runtime.target_runner import TargetPass, TargetRunner

logger = logging.getLogger(__name__)


class TargetLoop:
    """Requests in, deltas out. Not thread-safe: add, abort and step belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        runner: TargetRunner,
        draft_port: DraftPort | None,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_size: int,
    ) -> None:
        self.config = config
        self.runner = runner
        self.draft_port = draft_port
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.pool = PagePool(config.num_kv_pages)
        self.scheduler = Scheduler(
            self.pool,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
        )
        self.num_steps = 0
        self.num_dropped_proposals = 0
        self._opened: dict[str, int] = {}  # requests that the drafter knows, with the epoch it was told
        self._salt = secrets.token_hex(8) if config.seed is None else str(config.seed)

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Queue one request. Raises InvalidRequest, ContextLengthExceeded or Overloaded; nothing else is disturbed."""
        self.check(spec)
        if self.scheduler.get(spec.request_id) is not None:
            raise InvalidRequest(f"request_id {spec.request_id!r} is in use", param="request_id")
        self.scheduler.add(
            Request.create(
                spec,
                seed=self._noise_key(spec),
                matching=spec.params.seed is not None or self.config.seed is not None,
                max_model_len=self.config.max_model_len,
                eos_token_ids=self.eos_token_ids,
                num_speculative_tokens=self.config.num_speculative_tokens if self.draft_port else 0,
            )
        )

    def check(self, spec: RequestSpec) -> None:
        """Refuse what this engine could never run. Raises InvalidRequest or ContextLengthExceeded."""
        check_spec(spec, vocab_size=self.vocab_size, max_model_len=self.config.max_model_len)

    def abort(self, request_id: str) -> None:
        """Forget a request, running or queued; unknown ids are ignored."""
        if self.scheduler.abort(request_id):
            self._tell_departures()

    def _noise_key(self, spec: RequestSpec) -> int:
        if spec.params.seed is not None:
            return spec.params.seed & (2**64 - 1)
        digest = hashlib.blake2b(f"{self._salt}:{spec.request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestDelta]:
        """Run one step; returns what it brought to each request that it sampled for."""
        planned = self.scheduler.plan()
        self._tell_departures()  # before anything else: preempted requests must not keep a drafter context
        if not planned:
            return []
        self.num_steps += 1
        proposals = self._draft(planned)
        try:
            batch, result, outcomes = self._verify(planned, proposals)
        except UnitLost:  # a rank is gone: nothing can go on here, and every request can elsewhere
            raise
        except Exception as error:  # whatever it was, it ends these requests and no others
            logger.exception("step %d failed; its %d requests end with an error", self.num_steps, len(planned))
            deltas = self.scheduler.fail(planned, f"{type(error).__name__}: {error}")
        else:
            deltas = self.scheduler.commit(planned, outcomes)
            self._commit_context(planned, batch, result)
        self._tell_departures()
        return deltas

    def _draft(self, planned: Sequence[Planned]) -> dict[str, Proposal]:
        """Ask for drafts; anything that does not fit what was asked for is dropped, and its request decodes plainly."""
        if self.draft_port is None:
            return {}
        wanted: dict[str, Wanted] = {}
        for part in planned:
            request = part.request
            if part.width == 0:
                continue
            if part.start + part.width + 1 > self.config.drafter_max_model_len:
                self._stop_drafting(request, "context_too_long")
                continue
            if self._opened.get(request.request_id) == request.epoch:
                wanted[request.request_id] = Wanted(request.request_id, request.epoch, part.start, part.width)
        if not wanted:
            return {}
        try:
            proposed = propose(self.draft_port, list(wanted.values()))
        except Exception:  # a drafter that fails costs speed, never an answer
            logger.exception("the drafter failed; %d requests go on as plain decoding", len(wanted))
            self._stop_drafting_all([part.request for part in planned])
            return {}
        proposals: dict[str, Proposal] = {}
        for proposal in proposed:
            asked = wanted.get(proposal.request_id)
            fits = asked is not None and (proposal.epoch, proposal.base_len) == (asked.epoch, asked.base_len)
            if fits and 0 < len(proposal.token_ids) <= asked.width:  # type: ignore[union-attr]
                proposals[proposal.request_id] = proposal
            else:
                self.num_dropped_proposals += 1
        return proposals

    def _stop_drafting(self, request: Request, reason: str) -> None:
        request.draftable = False
        request.stats.skipped_reason = reason
        epoch = self._opened.pop(request.request_id, None)
        if epoch is not None and self.draft_port is not None:
            self.draft_port.send([Close(request.request_id, epoch)])

    def _stop_drafting_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.draftable:
                request.draftable = False
                request.stats.skipped_reason = "drafter_unavailable"
                self._opened.pop(request.request_id, None)

    def _verify(
        self, planned: Sequence[Planned], proposals: dict[str, Proposal]
    ) -> tuple[InputBatch, TargetPass, list[Outcome | None]]:
        batch = build_input_batch(planned, proposals, self.pool, self.config.page_size, self.config.device)
        result = self.runner.forward(batch)
        return batch, result, self.runner.verify(result, planned, proposals)

    def _commit_context(self, planned: Sequence[Planned], batch: InputBatch, result: TargetPass) -> None:
        """Send the context rows of every committed position to the drafter, and where each request stands now."""
        if self.draft_port is None:
            return
        opens: list[Open] = []
        spans: list[RowSpan] = []
        rows: list[int] = []
        commits: list[Commit] = []
        for part, row_start in zip(planned, batch.row_starts, strict=True):
            request, start = part.request, part.start
            if not request.draftable or self.scheduler.get(request.request_id) is not request:
                continue
            if request.epoch != part.epoch:
                continue
            if self._opened.get(request.request_id) != request.epoch:
                if start != 0:
                    continue
                opens.append(
                    Open(request.request_id, request.epoch, request.params.temperature, request.seed, request.matching)
                )
                self._opened[request.request_id] = request.epoch
            num_rows = request.num_computed - start
            spans.append(RowSpan(request.request_id, request.epoch, start, num_rows))
            rows.extend(range(row_start, row_start + num_rows))
            anchor = request.token_ids[-1] if request.decodes else None
            commits.append(Commit(request.request_id, request.epoch, request.num_computed, anchor))
        if spans:
            try:
                context = Rows(tuple(spans), self.runner.context_rows(result, rows))
                self.draft_port.send([*opens, context, *commits])
            except Exception:  # as above: the tokens of this step stand
                logger.exception("the drafter failed; %d requests go on as plain decoding", len(spans))
                self._stop_drafting_all([part.request for part in planned])

    def _tell_departures(self) -> None:
        departed = self.scheduler.take_departed()
        if self.draft_port is None:
            return
        closes = []
        for request_id, epoch in departed:
            if self._opened.get(request_id) == epoch:
                del self._opened[request_id]
                closes.append(Close(request_id, epoch))
        if closes:
            self.draft_port.send(closes)

    # ---- facts ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What runs, and how full it is; plain values."""
        return {
            "model": self.config.served_model_name,
            "vocab_size": self.vocab_size,
            "max_model_len": self.config.max_model_len,
            "eos_token_ids": sorted(self.eos_token_ids),
            "config": self.config.as_dict(),
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting),
            "num_free_pages": self.pool.num_free,
            "num_pages": self.pool.num_pages,
            "num_preemptions": self.scheduler.num_preemptions,
            "num_steps": self.num_steps,
            "num_dropped_proposals": self.num_dropped_proposals,
            "draft_counters": self.draft_port.counters() if self.draft_port else {},
        }

    def close(self) -> None:
        """Release the drafter's side; the loop must not be stepped afterwards."""
        if self.draft_port is not None:
            self.draft_port.close()
