"""The HTTP front: OpenAI requests over `Client`. One instance per ingress replica; it holds no tensor and no request state.

The first item of every stream is awaited before the headers go out, so that a refusal has its own status. A client that
disconnects cancels its request in the engine, queued or running.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dflash2_ray import __version__
from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.engine.client import Client
from dflash2_ray.errors import InvalidRequest
from dflash2_ray.serving.banner import banner
from dflash2_ray.serving.openai_api import (
    SPECULATIVE_HEADER,
    ApiRequest,
    Envelope,
    chunk_choice,
    error_body,
    plain_error,
    read_request,
    response_body,
    usage_of,
)

logger = logging.getLogger("ray.serve")
READY_TIMEOUT_S = 5.0
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

def request_id_of(request: Request) -> str:
    """The caller's x-request-id, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex


class Ingress:
    """The routes. Serve builds it with the unit's handle; `serving.application` wraps it as the ingress deployment."""

    async def __init__(self, config: ServiceConfig, unit: Any, http_url: str) -> None:  # type: ignore[misc]
        self._client = Client.from_handle(unit, config.generation_config, config.resume_timeout_s)
        facts = await self._client.describe()
        await self._client.text()
        self._model = str(facts["model"])
        self._started = int(time.time())
        for line in banner(facts, http_url).splitlines():
            logger.info(line)

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, *, chat: bool) -> Response:
        """Both generating routes: check, submit, await the first items, answer whole or as a stream."""
        request_id = request_id_of(request)
        streams: list[AsyncIterator[GenerationChunk]] = []
        try:
            body = await _json(request)
            asked = read_request(body, request.headers.get(SPECULATIVE_HEADER), chat=chat, served_model=self._model)
            streams = await self._open(asked, request_id)
            envelope = Envelope.new(request_id, self._model, chat)
            firsts = await _all([anext(stream) for stream in streams])
            if asked.stream:
                events = self._events(asked, envelope, streams, firsts)
                return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
            generations = await _all(
                [_rest(stream, first) for stream, first in zip(streams, firsts, strict=True)]
            )
            return JSONResponse(response_body(envelope, generations, asked.return_token_ids))
        except asyncio.CancelledError:
            await _close(streams)
            raise
        except Exception as error:
            await _close(streams)
            status, failure, headers = error_body(error, request_id)
            if status >= 500:
                logger.error("request %s: %s: %s", request_id, type(error).__name__, error)
            return JSONResponse(failure, status, headers=headers)

    async def _open(self, asked: ApiRequest, request_id: str) -> list[AsyncIterator[GenerationChunk]]:
        """One stream per choice; nothing is submitted before its first item is asked for."""
        unique = f"{request_id}-{uuid.uuid4().hex[:8]}"  # clients may repeat their own ids
        if asked.messages is not None:
            return [self._client.astream(messages=asked.messages, request_id=unique, **asked.sampling)]
        return [
            self._client.astream(
                prompt if isinstance(prompt, str) else None,
                prompt_token_ids=None if isinstance(prompt, str) else prompt,
                request_id=f"{unique}-{index}",
                **asked.sampling,
            )
            for index, prompt in enumerate(asked.prompts)
        ]

    async def _events(
        self,
        asked: ApiRequest,
        envelope: Envelope,
        streams: list[AsyncIterator[GenerationChunk]],
        firsts: list[GenerationChunk],
    ) -> AsyncIterator[str]:
        """Server-sent events: chunks of all choices as they come, then usage if asked for, then [DONE]."""
        generations: dict[int, Generation] = {}
        head = envelope.head(streaming=True)
        usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
        try:
            if envelope.chat:
                yield _event({**head, "choices": [chunk_choice(envelope, 0, "", first=True)], **usage})
            async for index, chunk in _merged(streams, firsts):
                if chunk.generation is not None:
                    generations[index] = chunk.generation
                token_ids = list(chunk.token_ids)
                for choice in _choices(envelope, index, chunk):
                    if asked.return_token_ids:
                        choice["token_ids"], token_ids = token_ids, []  # each id once, in the first event of its chunk
                    body = {**head, "choices": [choice], **usage}
                    if asked.continuous_usage:
                        body["usage"] = chunk.usage.as_dict()
                    yield _event(body)
            done = [generations[index] for index in range(len(streams))]
            if asked.include_usage:
                last = {**head, "choices": [], "usage": usage_of(done)}
                if len(done) == 1:
                    last["metrics"] = done[0].metrics
                yield _event(last)
        except Exception as error:
            logger.error("stream %s: %s: %s", envelope.id, type(error).__name__, error)
            yield _event(error_body(error, envelope.id)[1])
        finally:
            await _close(streams)
        yield "data: [DONE]\n\n"

    # ---- facts ------------------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """The `/v1/models` list."""
        facts = await self._client.describe()
        model = {
            "id": self._model, "object": "model", "created": self._started, "owned_by": "dflash2_ray",
            "max_model_len": facts["max_model_len"],
        }
        return {"object": "list", "data": [model]}

    async def ready(self) -> Response:
        """200 when a unit would take a request now, else 503; a unit without its drafter is ready, but degraded."""
        try:
            facts = await asyncio.wait_for(self._client.describe(), READY_TIMEOUT_S)
        except Exception as error:
            body = plain_error(f"no unit is ready: {type(error).__name__}", "server_error", None, "service_unavailable")
            return JSONResponse(body, 503, headers={"Retry-After": "1"})
        return JSONResponse({"status": "degraded" if facts["degraded"] else "ready", "degraded": facts["degraded"]})

    async def server_info(self) -> dict[str, Any]:
        """The resolved configuration and how full the engine is."""
        return {"version": __version__, **await self._client.describe()}


async def _json(request: Request) -> Any:
    try:
        return json.loads(await request.body(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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
) -> AsyncIterator[tuple[int, GenerationChunk]]:
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


def _choices(envelope: Envelope, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
    """Chat ends with an empty delta that carries the finish reason; completions carry it on the last text."""
    if not envelope.chat:
        choice = chunk_choice(envelope, index, chunk.text, chunk.finish_reason)
        if chunk.generation is not None:
            choice["stop_reason"] = chunk.generation.stop_reason
        return [choice]
    choices = []
    if chunk.text or chunk.finish_reason is None:
        choices.append(chunk_choice(envelope, index, chunk.text))
    if chunk.finish_reason is not None and chunk.generation is not None:
        choices.append({**chunk_choice(envelope, index, "", chunk.finish_reason), "stop_reason": chunk.generation.stop_reason})
    return choices


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
