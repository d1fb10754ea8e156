"""`Client`: the running service from Python, through Ray, without HTTP. The ingress uses the same class.

It tokenises, sends one Ray call per request (and one more for each time that its unit is lost) to a unit, and turns deltas into
text. It must not know HTTP.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.exceptions import BackPressureError, RayServeException

from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.wire import merge_items
from dflash2_ray.engine.front_lines import Inbox, Lines
from dflash2_ray.engine.overview import overview
from dflash2_ray.engine.resume import ResumableRequest
from dflash2_ray.engine.tracing import RequestTrace, TraceOrigin, traced
from dflash2_ray.errors import DFlash2Error, Overloaded, Stopping, UnitLost
from dflash2_ray.text.text_side import Messages, TextSide, each_choice

UNIT_DEPLOYMENT = "unit"
_RAY_ERRORS = (ray.exceptions.RayError, RayServeException, BackPressureError)
_T = TypeVar("_T")


class Client:
    """`Client(app_name="default")`, with Ray initialised (`ray.init(address="auto")` or inside a cluster).

    `generate` and `stream` block; `agenerate` and `astream` are for event loops. Sampling keywords have the names of the
    HTTP fields. A request whose unit is lost goes on at another one, or at the one that comes back, token for token; its
    client sees an error only when none can take it for `resume_timeout_s`. Errors are those of `dflash2_ray.errors`.
    """

    def __init__(
        self, app_name: str = "default", *, generation_config: str = "auto", resume_timeout_s: float = 120.0
    ) -> None:
        self._handle = serve.get_deployment_handle(UNIT_DEPLOYMENT, app_name=app_name)
        self._generation_config = generation_config
        self.resume_timeout_s = resume_timeout_s
        self._text: TextSide | None = None
        self._lines: Lines | None = None

    @classmethod
    def from_handle(cls, handle: Any, generation_config: str, resume_timeout_s: float) -> "Client":
        """The ingress's way in: a handle that Serve bound for it, and lines to its units, because it has one event loop only."""
        client = cls.__new__(cls)
        client._handle, client._generation_config, client._text = handle, generation_config, None
        client.resume_timeout_s = resume_timeout_s
        client._lines = Lines()
        return client

    # ---- blocking -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Complete one or several prompts (submitted together), results in order."""
        return _background(
            self.agenerate(prompt, messages=messages, prompt_token_ids=prompt_token_ids, **sampling)
        ).result()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Iterator[GenerationChunk]:
        """Chunks of one generation; submitted at once. Closing the iterator cancels the request."""
        chunks = self.astream(prompt, messages=messages, prompt_token_ids=prompt_token_ids, **sampling)
        return _blocking(chunks, _background(_next(chunks)))

    # ---- asyncio ----------------------------------------------------------------------------------------------------

    async def text(self) -> TextSide:
        """Tokenizer and template of the served target, fetched once."""
        if self._text is None:
            try:
                files = await self._handle.text_files.remote()
            except _RAY_ERRORS as error:
                raise _translated(error) from None
            self._text = TextSide.from_files(files, self._generation_config)
        return self._text

    async def describe(self) -> dict[str, Any]:
        """What runs, and how full it is. Raises UnitLost."""
        try:
            return dict(await self._handle.describe.remote())
        except _RAY_ERRORS as error:
            raise _translated(error) from None

    def refusal(self) -> Overloaded | None:
        """A refusal in the name of a full unit, counted there, if all units that run are known to be full. Only for fronts with lines."""
        return None if self._lines is None else self._lines.refuse(_running_units(self._handle))

    async def overview(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The state of all units (`engine.overview`), in about that time whatever hangs."""
        return await overview(self._handle, timeout_s)

    async def agenerate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Like `generate`, awaited."""

        async def one(text: Any, chat: Any, ids: Any, options: dict[str, Any], num_choices: int) -> Generation:
            stream = self.astream(text, messages=chat, prompt_token_ids=ids, num_choices=num_choices, **options)
            return _last([chunk async for chunk in stream])

        parts = _each(prompt, messages, prompt_token_ids)
        choices = each_choice(sampling)
        counts = [len(choices), *[0] * (len(choices) - 1)]
        return list(
            await asyncio.gather(
                *(one(*part, *choice) for part in parts for choice in zip(choices, counts, strict=True))
            )
        )

    async def astream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        session_id: str = "",
        num_choices: int = 1,
        trace_origin: TraceOrigin | None = None,
        hold_s: Callable[[], float] = lambda: 0.0,
        **sampling: Any,
    ) -> AsyncIterator[GenerationChunk]:
        """Chunks of one generation, submitted when the iteration starts; closing or cancelling it cancels the request. session_id: with
        `routing=session` requests of one session go to one unit. num_choices: for the metrics, the option n with the first of its choices,
        0 with the others. hold_s: asked before every chunk but the first for the seconds in which more may join it; its end waits for nothing."""
        request_id = request_id or f"client-{uuid.uuid4().hex}"
        with traced(request_id, trace_origin) as trace:
            await self.text()
            # Templates, tokenizers and grammars take their time on long inputs; the streams of other requests share this loop.
            request = await asyncio.to_thread(
                self._prepare, prompt, messages, prompt_token_ids, sampling, request_id, trace is not None
            )
            if trace is not None:
                trace.asked(sampling)
            async with contextlib.aclosing(self._chunks(request, session_id, num_choices, trace, hold_s)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _chunks(
        self,
        request: ResumableRequest,
        session_id: str,
        num_choices: int,
        trace: RequestTrace | None,
        hold_s: Callable[[], float],
    ) -> AsyncGenerator[GenerationChunk, None]:
        """The request's chunks, over as many attempts as it takes."""
        while not request.finished:
            spec = request.attempt() | {"num_choices": num_choices} | ({"by_line": True} if self._lines else {})
            if trace is not None:
                trace.attempt()
            response: Any = self._handle.options(stream=True, session_id=session_id).generate.remote(spec)
            items = _Items(response, self._lines, spec["request_id"])
            try:
                while not request.finished:
                    async with asyncio.timeout(request.patience_s):
                        item = await items.next(hold_s() if request.begun else 0.0)
                    if trace is not None:
                        trace.heard(item)
                    chunk = request.absorb(item)
                    if trace is not None and chunk.generation is not None:
                        trace.answered(chunk.generation)
                    yield chunk
            except (UnitLost, Stopping, Overloaded, TimeoutError, *_RAY_ERRORS) as error:
                await asyncio.sleep(request.lost(_translated(error)))
            finally:
                items.leave(chunk.usage.completion_tokens if request.finished and not request.ended else None)
                if not request.ended:
                    response.cancel()

    def _prepare(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: Sequence[int] | None,
        sampling: Mapping[str, Any],
        request_id: str,
        is_traced: bool,
    ) -> ResumableRequest:
        assert self._text is not None, "text files are fetched first"
        prepared = self._text.prepare(prompt, token_ids, messages, sampling)
        spec = RequestSpec(request_id, tuple(prepared.token_ids), prepared.params, traced=is_traced)
        return ResumableRequest(spec, self._text.assembler(request_id, prepared), self.resume_timeout_s)


class _Items:
    """One attempt's items: by a line where there is one, else by the Ray stream itself."""

    def __init__(self, response: Any, lines: Lines | None, request_id: str) -> None:
        self._response, self._lines, self._request_id = response, lines, request_id
        self._address: dict[str, Any] | None = None
        self._inbox: Inbox | None = None

    async def next(self, hold_s: float) -> dict[str, Any] | None:
        """The next item, with all that came since the last one and, by a line, that comes while it is held; None at an early end."""
        if self._inbox is None:
            item: dict[str, Any] | None = await _next(self._response)
            if item is None or "line" not in item or self._lines is None:
                return item
            self._inbox = await self._lines.take(item["line"], self._request_id)
            if self._inbox is None:
                return await _next(self._response)
            self._address = item["line"]
        items = await self._inbox.take(hold_s)
        whole = [one for one in items if one is not None]
        return merge_items(whole) if whole else None

    def leave(self, num_tokens: int | None) -> None:
        """Nothing more is wanted. num_tokens: of a text that ended before the engine did."""
        if self._lines is not None and self._address is not None:
            self._lines.leave(self._address, self._request_id, num_tokens)


# ---- blocking use: one event loop in a thread of its own ------------------------------------------------------------------


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="dflash2-client", daemon=True).start()
    return loop


def _background(work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
    return asyncio.run_coroutine_threadsafe(work, _background_loop())


async def _next(items: AsyncIterator[_T]) -> _T | None:
    return await anext(items, None)


def _blocking(
    chunks: AsyncIterator[GenerationChunk], first: "concurrent.futures.Future[GenerationChunk | None]"
) -> Iterator[GenerationChunk]:
    """The chunks of an asynchronous stream whose first one is on its way."""
    try:
        chunk = first.result()
        while chunk is not None:
            yield chunk
            chunk = _background(_next(chunks)).result()
    finally:
        first.cancel()
        _background(chunks.aclose()).result()  # type: ignore[attr-defined]


def _each(prompt: Any, messages: Any, token_ids: Any) -> list[tuple[Any, Any, Any]]:
    """One (prompt, messages, token ids) per generation."""
    if isinstance(prompt, (list, tuple)):
        return [(one, None, None) for one in prompt]
    if isinstance(token_ids, (list, tuple)) and token_ids and all(isinstance(one, (list, tuple)) for one in token_ids):
        return [(None, None, one) for one in token_ids]
    return [(prompt, messages, token_ids)]


def _last(chunks: Sequence[GenerationChunk]) -> Generation:
    generation = chunks[-1].generation
    assert generation is not None, "the last chunk of a stream carries its generation"
    return generation


def _running_units(handle: Any) -> list[str]:
    """Serve's names of the units that its router would send a request to; none before the first request."""
    router = handle._router
    requests = None if router is None else router._asyncio_router._request_router
    return [] if requests is None else [replica.unique_id for replica in list(requests.curr_replicas)]


def _translated(error: Exception) -> DFlash2Error:
    """Ray's errors as ours: back-pressure is an overload, anything else means that the unit is gone."""
    if isinstance(error, DFlash2Error):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded("the service is full; retry later")
    if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(error, ray.exceptions.RayActorError):
        cause = error.cause
        if isinstance(cause, UnitLost):
            return cause
    return UnitLost(f"the unit is gone: {type(error).__name__}")
