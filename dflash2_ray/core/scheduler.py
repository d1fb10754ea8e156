"""Which request computes how many tokens in the next step, and what a finished step means for each of them.

A step is a map request → number of tokens; there is no prefill or decode phase. A request that has its anchor left runs
one row plus its drafts; any other runs a chunk of its uncomputed tokens. Running requests go first, in order of
admission; when pages run out the youngest running request is preempted and recomputed later, with a higher epoch.
A request starts behind the full pages that the prefix cache has of it, every time that it is admitted.
The scheduler decides and counts; it must not know tensors, models or how drafts are made.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflash2_ray.core.messages import RequestDelta, StepCount, TokenLogprobs
from dflash2_ray.core.page_pool import PagePool
from dflash2_ray.core.prefix_cache import extend_keys
from dflash2_ray.core.request import Request, RequestState
from dflash2_ray.core.wire import pack_error
from dflash2_ray.errors import DFlash2Error, Overloaded, StepFailed


@dataclass(slots=True)
class Planned:
    """One request's part of a step: tokens `start … start + num_tokens - 1`, then up to `width` drafts.

    `samples`: the last of these tokens is the newest of the request, so the step decides what follows it.
    `epoch` is the request's at planning time: a result for another epoch is void.
    """

    request: Request
    epoch: int
    start: int
    num_tokens: int
    width: int
    samples: bool


@dataclass(slots=True)
class Outcome:
    """What verification found for one planned request: the drafts that were verified, how many were accepted, and the
    token that the target adds behind them (None: there is none, for the reason `error`). `logprobs`: one entry per accepted
    draft and one for the next token, where asked for. None in place of an outcome means that the row did not sample."""

    drafts: Sequence[int]
    num_accepted: int
    next_token: int | None
    logprobs: Sequence[TokenLogprobs] | None = None
    error: DFlash2Error | None = None


class Scheduler:
    """Continuous batching over one page pool. caches_prefixes: full pages are kept and found again. drafter_window: how many context
    rows in front of a position a drafter needs there, None for all."""

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_queued_requests: int,
        caches_prefixes: bool = False,
        drafter_window: int | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queued_requests = max_queued_requests
        self.caches_prefixes = caches_prefixes
        self._drafter_pages = None if drafter_window is None else -(-drafter_window // page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._departed: list[tuple[str, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def has_room(self) -> bool:
        """Whether one more request would be taken."""
        return len(self._requests) < self.max_num_seqs + self.max_queued_requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if not self.has_room():
            raise Overloaded(
                f"the queue is full: {len(self.running)} requests run and {len(self.waiting)} wait "
                f"(max_queued_requests={self.max_queued_requests}); retry later"
            )
        assert request.request_id not in self._requests, f"request id {request.request_id!r} is in use"
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request wherever it is; unknown ids are ignored. Returns whether it was there."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def take_departed(self) -> list[tuple[str, int]]:
        """(request_id, epoch) of requests that left the running set since the last call, for the drafter."""
        departed, self._departed = self._departed, []
        return departed

    def plan(
        self,
        widths: int | Mapping[str, int] | None = None,
        *,
        takes: Callable[[Request], bool] | None = None,
        admits: bool = True,
        num_tokens: int | None = None,
    ) -> list[Planned]:
        """The next step; empty when nothing can run. Pages for every planned row are held when it returns.

        widths: most draft slots per request, for all or by request id (0 for an id that is missing); None: their own.
        takes: which running requests belong to this step. admits: whether waiting requests may start in it.
        num_tokens: most tokens of this step, below the configured number.
        """
        planned: list[Planned] = []
        budget = min(self.max_num_batched_tokens, num_tokens or self.max_num_batched_tokens)
        preempted_before = self.num_preemptions
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            (decoding if request.decodes else prefilling).append(request)
        for index, request in enumerate(decoding + prefilling):  # a long prefill starves no decode
            if request.state is not RequestState.RUNNING:  # preempted for an older one in this very loop
                continue
            if takes is not None and not takes(request):
                continue
            most = widths.get(request.request_id, 0) if isinstance(widths, Mapping) else widths
            part = self._plan_running(request, budget, most, decodes=index < len(decoding))
            if part is not None:
                planned.append(part)
                budget -= part.num_tokens + part.width
        if self.num_preemptions > preempted_before:  # its pages are needed; admitting now would only preempt again
            return [part for part in planned if part.request.epoch == part.epoch]
        while admits and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            part = self._admit(self.waiting[0], budget)
            if part is None:
                break
            planned.append(part)
            budget -= part.num_tokens
        return planned

    def _plan_running(self, request: Request, budget: int, most: int | None, *, decodes: bool) -> Planned | None:
        if decodes:
            num_tokens = 1
            width = request.draft_width
            if most is not None and most < width:
                width = most
            samples = True
        else:
            num_tokens = min(request.prefill_goal - request.num_computed, budget)
            width = 0
            samples = request.num_computed + num_tokens == len(request.token_ids)
        if budget <= 0 or not self._hold_pages(request, request.num_computed + num_tokens + width):
            return None
        return Planned(request, request.epoch, request.num_computed, num_tokens, width, samples)

    def _hold_pages(self, request: Request, num_positions: int) -> bool:
        """Pages for `num_positions`, preempting younger requests if need be; False if the request itself had to go."""
        num_pages = -(-num_positions // self.page_size)
        while not self.pool.grow(request.request_id, num_pages):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._departed.append((request.request_id, request.epoch))
        self.pool.release(request.request_id)
        request.state = RequestState.WAITING
        request.num_computed = request.num_context_rows = 0
        request.epoch += 1
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request, budget: int) -> Planned | None:
        """Start the oldest waiting request if its whole prefill and one draft block fit into the free pages now."""
        goal = request.prefill_goal
        needed = -(-(goal + 1 + request.num_speculative_tokens) // self.page_size)
        shared = self._cached_pages(request, goal)
        if needed - self.pool.num_read(shared) > self.pool.num_free:
            return None
        longest = request.num_prompt_tokens + request.max_tokens + request.num_speculative_tokens
        self.pool.open(request.request_id, -(-longest // self.page_size), shared)
        start = len(shared) * self.page_size
        num_tokens = min(goal - start, budget)
        grown = self.pool.grow(request.request_id, -(-(start + num_tokens) // self.page_size))
        assert grown, "admission checked the free pages"
        self.waiting.popleft()
        self.running.append(request)
        request.state = RequestState.RUNNING
        request.num_computed = request.num_reused_tokens = start
        request.num_context_rows = start if request.draftable else 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(start, request.num_prompt_tokens)
            if self._looks_up(request):
                self.pool.cache.num_queried_tokens += len(request.token_ids)
                self.pool.cache.num_hit_tokens += start
        return Planned(request, request.epoch, start, num_tokens, 0, start + num_tokens == len(request.token_ids))

    def _looks_up(self, request: Request) -> bool:
        """Whether the request may start behind cached pages: not if it must compute every token of its prompt."""
        return self.caches_prefixes and request.prompt_logprobs is None

    def _cached_pages(self, request: Request, goal: int) -> list[int]:
        """The cached pages that the request can start behind; at least one of its `goal` positions is left to compute."""
        if not self._looks_up(request):
            return []
        most = (goal - 1) // self.page_size
        extend_keys(request.prefix_keys, request.token_ids, self.page_size, most)
        pages = self.pool.cache.find(request.prefix_keys[:most])
        return pages[: self.pool.cache.num_drafted(pages, self._drafter_pages)] if request.draftable else pages

    def note_context_rows(self, request_id: str, first: int, num_rows: int) -> None:
        """Context rows of a request lie beside its pages; those behind a gap are of no use."""
        request = self._requests.get(request_id)
        if request is not None and request.num_context_rows == first:
            request.num_context_rows += num_rows

    def _publish(self, request: Request, num_before: int) -> None:
        """Let others read the pages that came to be full of committed tokens since there were `num_before` of them."""
        if not self.caches_prefixes:
            return
        for index in range(num_before // self.page_size, request.num_computed // self.page_size):
            extend_keys(request.prefix_keys, request.token_ids, self.page_size, index + 1)
            has_rows = request.num_context_rows >= (index + 1) * self.page_size
            self.pool.publish(request.request_id, index, request.prefix_keys[index], has_rows=has_rows)

    def commit(
        self,
        planned: Sequence[Planned],
        outcomes: Sequence[Outcome | None],
        reason: Callable[[Planned], str | None] = lambda part: None,
    ) -> list[RequestDelta]:
        """Apply one finished step. Results for requests that were aborted or preempted meanwhile are dropped. `reason`: why a
        part had no drafts."""
        deltas = []
        for part, outcome in zip(planned, outcomes, strict=True):
            request = part.request
            if request.state is not RequestState.RUNNING or request.epoch != part.epoch:
                continue
            if outcome is None:
                request.num_computed = part.start + part.num_tokens
                self._publish(request, part.start)
                continue
            deltas.append(self._commit(part, outcome, reason))
            self._publish(request, part.start)
            if deltas[-1].finish_reason:
                self._finish(request)
        return deltas

    def _commit(self, part: Planned, outcome: Outcome, reason: Callable[[Planned], str | None]) -> RequestDelta:
        request = part.request
        first = request.num_output_tokens == 0
        committed = list(outcome.drafts[: outcome.num_accepted])
        if outcome.next_token is not None:
            committed.append(outcome.next_token)
        kept, finish_reason, stop_reason = request.take(committed)
        request.num_computed = len(request.token_ids) - 1
        steps: tuple[StepCount, ...] = ()
        if not first and kept:
            steps = ((len(outcome.drafts), len(kept), None if outcome.drafts else reason(part)),)
            request.stats.record(*steps[0])
        error = None
        if outcome.next_token is None and finish_reason is None:
            finish_reason, error = "error", pack_error(outcome.error or StepFailed("no token was decided"))
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        return RequestDelta(
            request.request_id,
            tuple(kept),
            finish_reason,
            stop_reason,
            steps=steps,
            logprobs=None if outcome.logprobs is None else tuple(outcome.logprobs[: len(kept)]),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            num_speculative_tokens=request.stats.num_speculative_tokens,
            num_cached_tokens=(request.num_cached_tokens or 0) if first else 0,
            skipped_reason=request.stats.skipped_reason,
            error=error,
            stats=request.stats.as_dict() if finish_reason else None,
            phases=request.phases,
        )

    def fail(self, planned: Sequence[Planned], error: str) -> list[RequestDelta]:
        """End every request of a step that raised; the others go on."""
        deltas = []
        for part in planned:
            if part.request.state is RequestState.RUNNING:
                deltas.append(RequestDelta(part.request.request_id, (), "error", error=pack_error(StepFailed(error))))
                self._finish(part.request)
        return deltas

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._departed.append((request.request_id, request.epoch))
            self.pool.release(request.request_id)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
