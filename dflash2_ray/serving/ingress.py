"""The HTTP front: OpenAI requests over `Client`. One instance per ingress replica; it holds no tensor and no request state.

The first item of every stream is awaited before the headers go out, so that a refusal has its own status. A client that
disconnects cancels its request in the engine, queued or running.
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dflash2_ray import __version__
from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.core.spec_counters import SpecCounters
from dflash2_ray.engine.books_reader import BooksReader
from dflash2_ray.engine.client import Client
from dflash2_ray.engine.tracing import TraceOrigin
from dflash2_ray.errors import DeadlinePassed, InvalidRequest, UnitLost
from dflash2_ray.serving.access_log import log_answer
from dflash2_ray.serving.banner import banner
from dflash2_ray.serving.choice_writer import ChoiceWriter
from dflash2_ray.serving.failures import failure
from dflash2_ray.serving.logprobs import LogprobsFormat
from dflash2_ray.serving.metrics import CONTENT_TYPE, exposition
from dflash2_ray.serving.openai_api import (
    SPECULATIVE_HEADER,
    ApiRequest,
    Echo,
    Envelope,
    check_model,
    chunk_choice,
    plain_error,
    read_request,
    response_body,
    usage_of,
)
from dflash2_ray.serving.request_id import request_id_of
from dflash2_ray.serving.token_routes import detokenize, tokenize
from dflash2_ray.text.text_side import each_choice

logger = logging.getLogger("ray.serve")
READY_TIMEOUT_S = 5.0
TRACE_HEADERS = ("traceparent", "tracestate")
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id")
_Item = TypeVar("_Item")
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Ingress:
    """The routes. Serve builds it with the handles of unit and bookkeeper; `serving.application` wraps it as the ingress deployment."""

    async def __init__(self, config: ServiceConfig, unit: Any, bookkeeper: Any, http_url: str, num_keys: int = 0) -> None:  # type: ignore[misc]
        self._deployed = config
        self._client = Client.from_handle(unit, config.generation_config, config.resume_timeout_s)
        self._books = BooksReader(bookkeeper)
        self._set_tunables(config)
        facts = await self._client.describe()
        self._text = await self._client.text()
        self._max_model_len, self._vocab_size = int(facts["max_model_len"]), int(facts["vocab_size"])
        self._num_speculative_tokens = int(facts["config"]["num_speculative_tokens"])
        self._model = str(facts["model"])
        self._started = int(time.time())
        for line in banner(facts, http_url, num_keys).splitlines():
            logger.info(line)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's change in place: the deployed settings with `user_config` over them. Raises ConfigError; then nothing changes."""
        self._set_tunables(self._deployed.tuned(user_config or {}))

    def _set_tunables(self, config: ServiceConfig) -> None:
        self._strict = config.strict_fields
        self._timeout_s = config.request_timeout_s
        self._client.resume_timeout_s = config.resume_timeout_s

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, *, chat: bool) -> Response:
        """Both generating routes: check, submit, await the first items, answer whole or as a stream."""
        request_id = request_id_of(request)
        streams: list[AsyncIterator[GenerationChunk]] = []
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout_s is None else loop.time() + self._timeout_s
        try:
            async with _until(deadline):
                body = await _json(request)
                header = request.headers.get(SPECULATIVE_HEADER)
                asked = read_request(body, header, chat=chat, served_model=self._model, strict=self._strict, max_width=self._num_speculative_tokens)
                assert asked.tool_use is None or chat, "tools are refused elsewhere"
                streams = self._open(asked, request_id, request.headers)
                envelope = Envelope.new(request_id, self._model, chat)
                logprobs = LogprobsFormat(self._text.tokenizer, chat=chat, as_ids=asked.tokens_as_ids)
                echoes = self._echoes(asked)
                firsts = await _all([anext(stream) for stream in streams])
                headers = self._headers(asked, firsts[0])
                if asked.stream:
                    events = self._events(asked, envelope, streams, firsts, logprobs, echoes, deadline)
                    return StreamingResponse(events, media_type="text/event-stream", headers={**_STREAM_HEADERS, **headers})
                generations = await _all([_rest(stream, first) for stream, first in zip(streams, firsts, strict=True)])
            log_answer(request_id, generations, chat=chat, streamed=False)
            return JSONResponse(response_body(envelope, generations, asked, logprobs, echoes), headers=headers)
        except asyncio.CancelledError:
            await _close(streams)
            raise
        except Exception as error:
            await _close(streams)
            status, failed, error_headers = failure(error, request_id, chat=chat)
            return JSONResponse(failed, status, headers=error_headers)

    def _open(self, asked: ApiRequest, request_id: str, headers: Mapping[str, str]) -> list[AsyncIterator[GenerationChunk]]:
        """One stream per choice, the choices of a prompt side by side; nothing is submitted before its first item is asked for."""
        unique = f"{request_id}-{uuid.uuid4().hex[:8]}"  # clients may repeat their own ids
        prompts: list[dict[str, Any]] = [{"messages": asked.messages}]
        if asked.messages is None:
            prompts = [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in asked.prompts]
        choices = [(prompt, sampling) for prompt in prompts for sampling in each_choice(asked.sampling)]
        carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        session_id = next((headers[name] for name in SESSION_HEADERS if name in headers), "")
        origin = TraceOrigin("chat" if asked.chat else "text_completion", self._model, carrier)
        return [
            self._client.astream(
                **prompt, request_id=f"{unique}-{index}", num_choices=0 if index % asked.num_choices else asked.num_choices,
                session_id=session_id, trace_origin=origin, **sampling,
            )
            for index, (prompt, sampling) in enumerate(choices)
        ]

    def _echoes(self, asked: ApiRequest) -> list[Echo]:
        """What stands in front of each choice."""
        echoes = [Echo()] * (1 if asked.messages is not None else len(asked.prompts))
        if asked.echo:
            tokenizer = self._text.tokenizer
            told = asked.logprobs is not None
            echoes = [
                Echo(one, tuple(tokenizer.encode(one)) if told else ()) if isinstance(one, str)
                else Echo(tokenizer.decode(one, False) if _are_ids(one) else "", tuple(one) if told else ())
                for one in asked.prompts
            ]
        return [echo for echo in echoes for _ in range(asked.num_choices)]

    def _headers(self, asked: ApiRequest, first: GenerationChunk) -> dict[str, str]:
        """What is known about the answer when it starts."""
        speculation = "on" if first.skipped_reason is None else f"off; reason={first.skipped_reason}"
        width = asked.sampling.get("num_speculative_tokens")
        if width is not None and width > self._num_speculative_tokens and first.skipped_reason is None:
            speculation = f"on; k={self._num_speculative_tokens}; reason=clamped"
        headers = {"x-dflash2-speculation": speculation}
        if asked.ignored:
            names = ", ".join(asked.ignored)
            headers["x-dflash2-ignored-fields"] = names.encode("unicode_escape").decode()[:1000]  # no control character may stand in a header
        return headers

    async def _events(
        self,
        asked: ApiRequest,
        envelope: Envelope,
        streams: list[AsyncIterator[GenerationChunk]],
        firsts: list[GenerationChunk],
        logprobs: LogprobsFormat,
        echoes: list[Echo],
        deadline: float | None,
    ) -> AsyncIterator[str]:
        """Server-sent events: chunks of all choices as they come, then usage if asked for, then [DONE]."""
        generations: dict[int, Generation] = {}
        offsets = dict.fromkeys(range(len(streams)), -1)  # characters of each choice that its log-probabilities cover; -1: none yet
        writers = [ChoiceWriter(envelope, index, asked.tool_use) for index in range(len(streams))]
        head = envelope.head(streaming=True)
        usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
        try:
            for index in range(len(streams)) if envelope.chat else ():
                yield _event({**head, "choices": [chunk_choice(envelope, index, "", first=True)], **usage})
            async for index, chunk in _before(deadline, _merged(streams, firsts)):
                if chunk.generation is not None:
                    generations[index] = chunk.generation
                token_ids = list(chunk.token_ids)
                text, told = chunk.text, None
                ids, entries = list(chunk.token_ids), [*(chunk.logprobs or ())]
                if offsets[index] < 0:  # the first of its choice
                    offsets[index], text = 0, echoes[index].text + text
                    ids, entries = [*echoes[index].token_ids, *ids], [*(chunk.prompt_logprobs or ()), *entries]
                if asked.logprobs is not None and ids:
                    told = logprobs.of(ids, entries, offsets[index])
                    offsets[index] += logprobs.length(ids)
                for choice in writers[index].choices(chunk, text):
                    choice["logprobs"], told = told, None
                    if asked.return_token_ids:
                        choice["token_ids"], token_ids = token_ids, []  # each id once, in the first event of its chunk
                    body = {**head, "choices": [choice], **usage}
                    if asked.continuous_usage:
                        body["usage"] = chunk.usage.as_dict()
                    yield _event(body)
            done = [generations[index] for index in range(len(streams))]
            log_answer(envelope.request_id, done, chat=envelope.chat, streamed=True)
            if asked.include_usage:
                last = {**head, "choices": [], "usage": usage_of(done, asked.num_choices)}
                if len(done) == 1:
                    last["metrics"] = done[0].metrics
                yield _event(last)
        except Exception as error:
            yield _event(failure(error, envelope.request_id, chat=envelope.chat)[1])
        finally:
            await _close(streams)
        yield "data: [DONE]\n\n"

    # ---- tokens -----------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        return tokenize(self._text, await _json(request), self._max_model_len)

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """The text of token ids."""
        return detokenize(self._text, await _json(request), self._vocab_size)

    # ---- facts ------------------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """The `/v1/models` list."""
        return {"object": "list", "data": [self._model_card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model by its name. Raises UnknownModel."""
        check_model(name, self._model)
        return self._model_card()

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model, "object": "model", "created": self._started, "owned_by": "dflash2_ray", "root": self._model,
            "max_model_len": self._max_model_len,
        }

    async def ready(self) -> Response:
        """200 when a unit would take a request now, else 503; a unit without its drafter is ready, but degraded."""
        try:
            facts = await asyncio.wait_for(self._client.describe(), READY_TIMEOUT_S)
        except Exception as error:
            body = plain_error(f"no unit is ready: {type(error).__name__}", "server_error", None, "service_unavailable")
            return JSONResponse(body, 503, headers={"Retry-After": "1"})
        return JSONResponse({"status": "degraded" if facts["degraded"] else "ready", "degraded": facts["degraded"]})

    async def server_info(self) -> dict[str, Any]:
        """The resolved configuration and how full the engine is; `internal_states` is where SGLang's tools look."""
        facts = await self._client.describe()
        length = SpecCounters(**facts["spec_counters"]).acceptance_length
        return {"version": __version__, **facts, "internal_states": [{"avg_spec_accept_length": length}]}

    async def status(self) -> dict[str, Any]:
        """The state of all units, whether or not one serves."""
        return {"version": __version__, **await self._client.overview()}

    async def metrics(self) -> Response:
        """Prometheus text of all units."""
        try:
            return Response(exposition(*await self._books.read()), media_type=CONTENT_TYPE)
        except UnitLost as error:
            return JSONResponse(plain_error(str(error), "server_error", None, "service_unavailable"), 503, headers={"Retry-After": "1"})


async def _json(request: Request) -> Any:
    """The parsed body. Raises InvalidRequest, also for text that cannot be sent back: half a surrogate pair."""
    try:
        text = (await request.body()).decode()
        body = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds half a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@contextlib.asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Raise DeadlinePassed inside the block at `deadline` (the loop's clock); None: never."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        if deadline is None or asyncio.get_running_loop().time() < deadline:
            raise
        raise DeadlinePassed("the request took longer than request_timeout_s") from None


async def _before(deadline: float | None, items: AsyncGenerator[_Item, None]) -> AsyncIterator[_Item]:
    """The items; DeadlinePassed instead of the one that would come too late."""
    async with contextlib.aclosing(items):
        while True:
            async with _until(deadline):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item


def _are_ids(ids: Any) -> bool:
    """Whether these can be token ids; whether they are is the engine's to say."""
    return all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in ids)


async def _rest(stream: AsyncIterator[GenerationChunk], first: GenerationChunk) -> Generation:
    last = first
    async for chunk in stream:
        last = chunk
    assert last.generation is not None, "the last chunk carries the generation"
    return last.generation


async def _all(awaitables: list[Any]) -> list[Any]:
    """Results of all; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _close(streams: list[Any]) -> None:
    for stream in streams:
        await stream.aclose()


async def _merged(
    streams: list[AsyncIterator[GenerationChunk]], firsts: list[GenerationChunk]
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """(choice index, chunk) of all streams in order of arrival."""
    for index, first in enumerate(firsts):
        yield index, first
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    pending = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                following = task.result()
                if following is not None:
                    pending[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, following
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
