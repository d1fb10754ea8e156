"""The serial step loop, the definition of correct: plan, draft, verify, commit, one step after the other.

Everything cleverer is tested against it token for token. It owns no thread: whoever holds it calls `step()`.
How wide a step drafts is `StepControl`'s choice (`draft_width=fixed`: always the full width); it changes speed, no greedy token.
"""

import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from dflash2_ray.config import EngineConfig
from dflash2_ray.core.admission import check_spec
from dflash2_ray.core.draft_port import Close, Commit, DraftPort, Open, Proposal, Rows, RowSpan, Wanted, propose
from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.core.ledger import Numbers
from dflash2_ray.core.messages import RequestDelta, RequestSpec
from dflash2_ray.core.page_pool import PagePool
from dflash2_ray.core.phase_times import PhaseTimes
from dflash2_ray.core.planner import Load
from dflash2_ray.core.request import Request, named
from dflash2_ray.core.scheduler import Outcome, Planned, Scheduler
from dflash2_ray.core.spec_counters import SpecCounters
from dflash2_ray.core.step_control import StepControl
from dflash2_ray.core.step_ledger import StepLedger
from dflash2_ray.core.step_sums import StepSums
from dflash2_ray.errors import InvalidRequest, UnitLost
from dflash2_ray.runtime.cuda_graphs import GraphPool
from dflash2_ray.runtime.input_batch import InputBatch, build_input_batch
from dflash2_ray.runtime.kept_rows import KeptRows
from dflash2_ray.runtime.operators import report_operators
from dflash2_ray.runtime.pending_rows import without_spans
from dflash2_ray.runtime.target_runner import TargetPass, TargetRunner

failure_log = FailureLog(logging.getLogger(__name__))


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
        clock: Callable[[], float] = time.perf_counter,
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
            caches_prefixes=config.enable_prefix_caching,
            drafter_window=config.drafter_window,
        )
        self.kept_rows = None
        if config.enable_prefix_caching and draft_port is not None:
            self.kept_rows = KeptRows(config.num_kv_pages, config.page_size)
        self.control = self._build_control()
        self.spec_counters = SpecCounters.of_width(config.num_speculative_tokens)
        self.step_ledger = StepLedger()
        self.num_steps = 0
        self.num_dropped_proposals = 0
        self._clock = clock
        self._opened: dict[str, int] = {}  # requests that the drafter knows, with the epoch it was told
        self._salt = secrets.token_hex(8) if config.seed is None else str(config.seed)

    def _build_control(self) -> StepControl:
        most = self.config.num_speculative_tokens if self.draft_port else 0
        return StepControl(most, adapts_width=most > 0 and self.config.draft_width == "auto")

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Queue one request. Raises InvalidRequest, ContextLengthExceeded or Overloaded; nothing else is disturbed."""
        self.check(spec)
        if self.scheduler.get(spec.request_id) is not None:
            raise InvalidRequest(f"request_id {spec.request_id!r} is in use", param="request_id")
        request = Request.create(
            spec,
            seed=self._noise_key(spec),
            matching=spec.params.seed is not None or self.config.seed is not None,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.eos_token_ids,
            num_speculative_tokens=self.config.num_speculative_tokens if self.draft_port else 0,
            phases=PhaseTimes(self._clock()) if spec.traced else None,
        )
        if request.draftable and len(request.token_ids) > self.config.drafter_max_model_len:
            self._stop_drafting(
                request, "context_too_long"
            )  # told now, so that it may start behind pages without context rows
        self.scheduler.add(request)
        self.step_ledger.queued(spec.request_id, self._clock())

    def check(self, spec: RequestSpec) -> None:
        """Refuse what this engine could never run. Raises InvalidRequest or ContextLengthExceeded."""
        check_spec(spec, vocab_size=self.vocab_size, max_model_len=self.config.max_model_len)
        if spec.params.grammar is not None and not self.runner.shapers.constrains:
            raise InvalidRequest("this engine has no tokenizer to constrain an output with", param="response_format")

    def abort(self, request_id: str) -> None:
        """Forget a request, running or queued; unknown ids are ignored."""
        if self.scheduler.abort(request_id):
            self.step_ledger.ended(request_id)
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
        started = self._clock()
        planned = self.scheduler.plan(self.control.decide(self._load()).width)
        self._tell_departures()  # before anything else: preempted requests must not keep a drafter context
        if not planned:
            return []
        drafting = self._clock()
        proposals = self._draft(planned)
        draft_s = self._clock() - drafting
        deltas = self._verify_and_commit(planned, proposals, started, draft_s)
        self._tell_departures()
        return deltas

    def _load(self) -> Load:
        """What is decoding now: counts, and limits that requests came with."""
        limits: dict[int, int] = {}
        for request in self.scheduler.running:
            if request.decodes:
                limit = request.num_speculative_tokens if request.draftable else 0
                limits[limit] = limits.get(limit, 0) + 1
        return Load.of(limits)

    def _draft(self, planned: Sequence[Planned]) -> dict[str, Proposal]:
        """Ask for drafts and wait for them."""
        wanted = self._wanted(planned)
        if self.draft_port is None or not wanted:
            return {}
        started = self._clock()
        try:
            proposed = propose(self.draft_port, list(wanted.values()), self._deadline_s)
        except Exception:  # a drafter that fails costs speed, never an answer
            failure_log.exception("the drafter failed; %d requests go on as plain decoding", len(wanted))
            self._stop_drafting_all([part.request for part in planned])
            return {}
        self._learn_draft(wanted, self._clock() - started)
        return self._fitting(proposed, wanted, planned)

    @property
    def _deadline_s(self) -> float | None:
        """How long to wait for proposals; None: the port's own limit."""
        return None if self.config.draft_deadline_ms is None else self.config.draft_deadline_ms / 1000

    def _wanted(self, planned: Sequence[Planned]) -> dict[str, Wanted]:
        """What to ask for. A block that would pass the end of the drafter's range ends speculation for its request."""
        if self.draft_port is None:
            return {}
        asking: list[Planned] = []
        for part in planned:
            request = part.request
            if part.width == 0:
                continue
            if part.start + part.width + 1 > self.config.drafter_max_model_len:
                self._stop_drafting(request, "context_too_long")
            elif self._opened.get(request.request_id) == request.epoch:
                asking.append(part)
        drafted = self.control.drafted_widths(Counter(part.width for part in asking))
        wanted: dict[str, Wanted] = {}
        for part in asking:
            width = drafted[part.width]
            if part.start + width + 1 > self.config.drafter_max_model_len:
                width = part.width
            request = part.request
            wanted[request.request_id] = Wanted(request.request_id, request.epoch, part.start, width)
        return wanted

    def _fitting(
        self, proposed: Sequence[Proposal], wanted: dict[str, Wanted], planned: Sequence[Planned]
    ) -> dict[str, Proposal]:
        """Proposals that fit what was asked for, cut to the planned width; others are dropped, and their requests decode
        plainly."""
        widths = {part.request.request_id: part.width for part in planned}
        proposals: dict[str, Proposal] = {}
        for proposal in proposed:
            asked = wanted.get(proposal.request_id)
            fits = asked is not None and proposal.epoch == asked.epoch and proposal.base_len == asked.base_len
            if fits and 0 < len(proposal.token_ids) <= asked.width:  # type: ignore[union-attr]
                proposals[proposal.request_id] = _cut(proposal, widths[proposal.request_id])
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

    def _verify_and_commit(
        self, planned: Sequence[Planned], proposals: dict[str, Proposal], started: float, draft_s: float
    ) -> list[RequestDelta]:
        """Everything behind the drafts. `started`, `draft_s`: when the step began, and what it waited for drafts."""
        self.num_steps += 1
        try:
            batch, result, outcomes = self._verify(planned, proposals)
        except UnitLost:  # a rank is gone: nothing can go on here, and every request can elsewhere
            raise
        except Exception as error:  # whatever it was, it ends these requests and no others
            failure_log.exception(
                "a step failed; its %d requests end with an error: %s",
                len(planned),
                named([part.request for part in planned]),
            )
            for part in planned:
                self.step_ledger.ended(part.request.request_id)
            return self.scheduler.fail(planned, f"{type(error).__name__}: {error}")
        context = self._take_context(planned, outcomes, batch, result)
        deltas = self.scheduler.commit(planned, outcomes, self._why_plain)
        self._commit_context(planned, context)
        ended = self._clock()
        seconds = ended - started - draft_s
        sums = StepSums.of(planned, outcomes)
        self._learn_step(sums, seconds, draft_s)
        self.step_ledger.step(planned, sums, deltas, started, ended, draft_s)
        self._add_phases(planned, proposals, started, draft_s, seconds)
        return deltas

    def _verify(
        self, planned: Sequence[Planned], proposals: dict[str, Proposal]
    ) -> tuple[InputBatch, TargetPass, list[Outcome | None]]:
        batch = build_input_batch(planned, proposals, self.pool, self.config.page_size)
        result = self.runner.forward(batch)
        self.runner.prompt_logprobs(result, batch, planned)
        return batch, result, self.runner.verify(result, planned, proposals)

    def _why_plain(self, part: Planned) -> str | None:
        """Why a request decodes plainly in a step of a drafter that it may use."""
        request = part.request
        if not request.draftable:
            return request.stats.skipped_reason
        if self._opened.get(request.request_id) != request.epoch:
            return "warmup"  # the drafter does not know its context yet, or not any more
        if part.width == 0:
            return "load"
        return "drafter_timeout" if self.draft_port is not None and self.draft_port.connected else "drafter_unavailable"

    def _take_context(
        self, planned: Sequence[Planned], outcomes: Sequence[Outcome | None], batch: InputBatch, result: TargetPass
    ) -> Rows | None:
        """Context rows of every position that this step will commit for requests that may be drafted for; kept beside the pages too,
        before anybody else may read those."""
        if self.draft_port is None:
            return None
        spans: list[RowSpan] = []
        rows: list[int] = []
        for part, outcome, row_start in zip(planned, outcomes, batch.row_starts, strict=True):
            request = part.request
            if request.draftable and request.epoch == part.epoch and self.scheduler.get(request.request_id) is request:
                num_rows = part.num_tokens + (outcome.num_accepted if outcome else 0)
                spans.append(RowSpan(request.request_id, request.epoch, part.start, num_rows))
                rows.extend(range(row_start, row_start + num_rows))
        if not spans:
            return None
        try:
            index = batch.index(rows)
            context = self.runner.context_rows(result, index)
        except Exception:  # as with drafts: the tokens of this step stand
            failure_log.exception("context rows failed; %d requests go on as plain decoding", len(spans))
            self._stop_drafting_all([part.request for part in planned])
            return None
        if self.kept_rows is not None:
            slots = batch.attention.slots
            self.kept_rows.write(slots if index is None else slots.index_select(0, index), context)
            for span in spans:
                self.scheduler.note_context_rows(span.request_id, span.first_position, span.num_rows)
        return Rows(tuple(spans), context)

    def _commit_context(self, planned: Sequence[Planned], context: Rows | None) -> None:
        """Send the context rows of every committed position to the drafter, and where each request stands now."""
        if self.draft_port is None or context is None:
            return
        opens: list[Open | Rows] = []
        commits: list[Commit] = []
        gone: set[str] = set()
        parts = {part.request.request_id: part.request for part in planned}
        for span in context.spans:
            request = parts[span.request_id]
            begins = self._opened.get(request.request_id) != request.epoch
            if (
                not request.draftable
                or self.scheduler.get(request.request_id) is not request
                or request.epoch != span.epoch
            ):
                gone.add(span.request_id)
            elif request.num_computed > self.config.drafter_max_model_len:
                self._stop_drafting(request, "context_too_long")
                gone.add(span.request_id)
            elif begins and span.first_position != request.num_reused_tokens:
                gone.add(span.request_id)
            else:
                if begins:
                    opens += self._open_messages(request)
                    self._opened[request.request_id] = request.epoch
                anchor = request.token_ids[-1] if request.decodes else None
                commits.append(Commit(request.request_id, request.epoch, request.num_computed, anchor))
        kept = without_spans(context, gone) if gone else context
        if kept is not None:
            try:
                self.draft_port.send([*opens, kept, *commits])
            except Exception:  # as above: the tokens of this step stand
                failure_log.exception("the drafter failed; %d requests go on as plain decoding", len(commits))
                self._stop_drafting_all([part.request for part in planned])

    def _open_messages(self, request: Request) -> list[Open | Rows]:
        """A request begins, with the context rows of the cached pages that it starts behind, as far back as the drafter looks."""
        reused, window = request.num_reused_tokens, self.config.drafter_window
        first = 0 if window is None else max(0, reused - window)
        opened = Open(
            request.request_id, request.epoch, request.params.temperature, request.seed, request.matching, first
        )
        if reused == first or self.kept_rows is None:
            return [opened]
        rows = self.kept_rows.read(self.pool.table(request.request_id), first, reused)
        return [opened, Rows((RowSpan(request.request_id, request.epoch, first, reused - first),), rows)]

    def _tell_departures(self) -> None:
        departed = self.scheduler.take_departed()
        if not departed:
            return
        for request_id, _ in departed:
            self.runner.shapers.forget(request_id)
        if self.draft_port is None:
            return
        closes = []
        for request_id, epoch in departed:
            if self._opened.get(request_id) == epoch:
                del self._opened[request_id]
                closes.append(Close(request_id, epoch))
        if closes:
            self.draft_port.send(closes)

    # ---- measurements ---------------------------------------------------------------------------------------------

    def _learn_step(self, sums: StepSums, seconds: float, draft_s: float) -> None:
        """Tell the control what a committed step took and accepted. Steps that mix prefill and decoding tell no times."""
        for (num_drafts, num_accepted), count in sums.blocks.items():
            self.spec_counters.record(num_drafts, num_accepted, count)
            self.control.decided(num_drafts, num_accepted, count)
        if sums.num_decoding == sums.num_requests:
            self.control.verified(sums.num_decoding, sums.num_rows, seconds, sums.num_decided, draft_s)
        elif sums.num_decoding == 0:
            self.control.prefilled(sums.num_requests, sums.num_rows, seconds)

    def _add_phases(
        self, planned: Sequence[Planned], proposals: dict[str, Proposal], started: float, draft_s: float, seconds: float
    ) -> None:
        """Tell traced requests what this step took; their deltas hold the same object."""
        for part in planned:
            phases = part.request.phases
            if phases is not None:
                transfer_s = min(draft_s, self.draft_port.last_transfer_s) if self.draft_port else 0.0
                decodes, drafted = part.start >= part.request.num_prompt_tokens, part.request.request_id in proposals
                phases.record(started, draft_s - transfer_s, transfer_s, seconds, decodes=decodes, drafted=drafted)

    def _learn_draft(self, wanted: dict[str, Wanted], seconds: float) -> None:
        """Tell the control what one draft pass took (several widths are several passes: they tell nothing)."""
        widths = {one.width for one in wanted.values()}
        if len(widths) == 1:
            self.control.drafted(len(wanted), widths.pop(), seconds)

    # ---- facts ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What runs, and how full it is; plain values."""
        return {
            "model": self.config.served_model_name,
            "vocab_size": self.vocab_size,
            "max_model_len": self.config.max_model_len,
            "eos_token_ids": sorted(self.eos_token_ids),
            "config": self.config.as_dict(),
            "operators": report_operators(self.config.device, self.config.dtype, drafts=self.draft_port is not None),
            "cuda_graphs": {one.name: one.describe() for one in self._graphs()},
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting),
            "num_free_pages": self.pool.num_free,
            "num_pages": self.pool.num_pages,
            "prefix_cache": {
                "num_pages": len(self.pool.cache),
                "num_queried_tokens": self.pool.cache.num_queried_tokens,
                "num_hit_tokens": self.pool.cache.num_hit_tokens,
            },
            "num_preemptions": self.scheduler.num_preemptions,
            "num_steps": self.num_steps,
            "num_dropped_proposals": self.num_dropped_proposals,
            "spec_counters": asdict(self.spec_counters),
            "step_control": self.control.describe(),
            "draft_counters": self.draft_port.counters() if self.draft_port else {},
        }

    def _graphs(self) -> list[GraphPool[Any]]:
        """The graphs of this process."""
        of_target = None if self.runner.verify_graphs is None else self.runner.verify_graphs.graphs
        return [one for one in (of_target, getattr(self.draft_port, "graphs", None)) if one is not None]

    def numbers(self) -> Numbers:
        """What this loop and its draft port have counted (`core.ledger`); any thread may ask."""
        counted = self.spec_counters
        numbers = self.step_ledger.numbers()
        numbers |= {
            f"accepted_per_position/{index}": count for index, count in enumerate(counted.accepted_per_position)
        }
        numbers |= {name: getattr(counted, name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
        numbers["preemptions"] = self.scheduler.num_preemptions
        numbers["prefix_cache_queries"] = self.pool.cache.num_queried_tokens
        numbers["prefix_cache_hits"] = self.pool.cache.num_hit_tokens
        return numbers | self.draft_port.ledger.copy() if self.draft_port else numbers

    def tune(self, *, draft_deadline_ms: float | None) -> None:
        """Change in place what may change while requests run."""
        self.config = replace(self.config, draft_deadline_ms=draft_deadline_ms)

    def forget_history(self) -> None:
        """Set the counters of the loop back and forget its prefixes: what ran before was a warm-up."""
        self.pool.forget_prefixes()
        self.num_steps = self.num_dropped_proposals = self.scheduler.num_preemptions = 0
        self.spec_counters = SpecCounters.of_width(self.config.num_speculative_tokens)
        self.step_ledger = StepLedger()
        if self.draft_port is not None:
            self.draft_port.ledger.clear()

    def close(self) -> None:
        """Release the drafter's side; the loop must not be stepped afterwards."""
        if self.draft_port is not None:
            self.draft_port.close()


def _cut(proposal: Proposal, width: int) -> Proposal:
    """The first `width` slots: how many is known before any of them was drawn."""
    if len(proposal.token_ids) <= width:
        return proposal
    ids, probs = proposal.candidate_ids, proposal.candidate_probs
    return replace(
        proposal,
        token_ids=proposal.token_ids[:width],
        candidate_ids=None if ids is None else ids[:width],
        candidate_probs=None if probs is None else probs[:width],
    )
