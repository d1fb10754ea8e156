"""The HTTP front: OpenAI requests over `Client`. One instance per ingress replica; it holds no tensor and no request state.

The first item of every stream is awaited before the headers go out, so that a refusal has its own status. A client that
disconnects cancels its request in the engine, queued or running.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dflash2_ray import __version__
from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.generation import GenerationChunk
from dflash2_ray.core.spec_counters import SpecCounters
from dflash2_ray.engine.books_reader import BooksReader
from dflash2_ray.engine.client import Client
from dflash2_ray.engine.tracing import TraceOrigin
from dflash2_ray.errors import Overloaded, UnitLost
from dflash2_ray.serving.access_log import log_answer
from dflash2_ray.serving.banner import banner
from dflash2_ray.serving.choice_streams import all_of, close_all, merged, rest_of
from dflash2_ray.serving.deadline import before, until
from dflash2_ray.serving.event_stream import HEADERS as EVENT_HEADERS
from dflash2_ray.serving.event_stream import EventStream
from dflash2_ray.serving.failures import failure
from dflash2_ray.serving.json_body import json_body
from dflash2_ray.serving.logprobs import LogprobsFormat
from dflash2_ray.serving.metrics import CONTENT_TYPE, exposition
from dflash2_ray.serving.openai_api import (
    SPECULATIVE_HEADER,
    ApiRequest,
    Echo,
    Envelope,
    check_model,
    plain_error,
    read_request,
    response_body,
)
from dflash2_ray.serving.pace import WHOLE_HOLD_S, Pace
from dflash2_ray.serving.request_id import request_id_of
from dflash2_ray.serving.token_routes import detokenize, tokenize
from dflash2_ray.text.text_side import each_choice

logger = logging.getLogger("ray.serve")
READY_TIMEOUT_S = 5.0
TRACE_HEADERS = ("traceparent", "tracestate")
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id")


class Ingress:
    """The routes. Serve builds it with the handles of unit and bookkeeper; `serving.application` wraps it as the ingress deployment."""

    async def __init__(  # type: ignore[misc]
        self, config: ServiceConfig, unit: Any, bookkeeper: Any, http_url: str, num_keys: int = 0
    ) -> None:
        self._deployed = config
        self._client = Client.from_handle(unit, config.generation_config, config.resume_timeout_s)
        self._books = BooksReader(bookkeeper)
        self._pace = Pace()
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

    def refusal(self) -> Overloaded | None:
        """What a request for a generation is told when no unit has a place for it; None: ask them."""
        return self._client.refusal()

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, *, chat: bool) -> Response:
        """Both generating routes: check, submit, await the first items, answer whole or as a stream."""
        request_id = request_id_of(request)
        streams: list[AsyncIterator[GenerationChunk]] = []
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout_s is None else loop.time() + self._timeout_s
        try:
            async with until(deadline):
                body = await json_body(request)
                header = request.headers.get(SPECULATIVE_HEADER)
                asked = read_request(
                    body,
                    header,
                    chat=chat,
                    served_model=self._model,
                    strict=self._strict,
                    max_width=self._num_speculative_tokens,
                )
                assert asked.tool_use is None or chat, "tools are refused elsewhere"
                streams = self._open(asked, request_id, request.headers)
                envelope = Envelope.new(request_id, self._model, chat)
                logprobs = LogprobsFormat(self._text.tokenizer, chat=chat, as_ids=asked.tokens_as_ids)
                echoes = self._echoes(asked)
                firsts = await all_of([anext(stream) for stream in streams])
                headers = self._headers(asked, firsts[0])
                if asked.stream:
                    events = EventStream(asked, envelope, logprobs, echoes)
                    pieces = self._pieces(events, streams, firsts, deadline)
                    return StreamingResponse(
                        pieces, media_type="text/event-stream", headers={**EVENT_HEADERS, **headers}
                    )
                generations = await all_of(
                    [rest_of(stream, first) for stream, first in zip(streams, firsts, strict=True)]
                )
            log_answer(request_id, generations, chat=chat, streamed=False)
            return JSONResponse(response_body(envelope, generations, asked, logprobs, echoes), headers=headers)
        except asyncio.CancelledError:
            await close_all(streams)
            raise
        except Exception as error:
            await close_all(streams)
            status, failed, error_headers = failure(error, request_id, chat=chat)
            return JSONResponse(failed, status, headers=error_headers)

    async def _pieces(
        self,
        events: EventStream,
        streams: list[AsyncIterator[GenerationChunk]],
        firsts: list[GenerationChunk],
        deadline: float | None,
    ) -> AsyncIterator[str]:
        try:
            with self._pace.streams(len(streams)):
                async with contextlib.aclosing(events.pieces(before(deadline, merged(streams, firsts)))) as pieces:
                    async for piece in pieces:
                        yield piece
        finally:
            await close_all(streams)

    def _open(
        self, asked: ApiRequest, request_id: str, headers: Mapping[str, str]
    ) -> list[AsyncIterator[GenerationChunk]]:
        """One stream per choice, the choices of a prompt side by side; nothing is submitted before its first item is asked for."""
        unique = f"{request_id}-{uuid.uuid4().hex[:8]}"  # clients may repeat their own ids
        prompts: list[dict[str, Any]] = [{"messages": asked.messages}]
        if asked.messages is None:
            prompts = [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in asked.prompts]
        choices = [(prompt, sampling) for prompt in prompts for sampling in each_choice(asked.sampling)]
        carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        session_id = next((headers[name] for name in SESSION_HEADERS if name in headers), "")
        origin = TraceOrigin("chat" if asked.chat else "text_completion", self._model, carrier)
        hold_s = self._pace.hold_s if asked.stream or asked.sampling.get("stop") else lambda: WHOLE_HOLD_S
        return [
            self._client.astream(
                **prompt,
                request_id=f"{unique}-{index}",
                num_choices=0 if index % asked.num_choices else asked.num_choices,
                session_id=session_id,
                trace_origin=origin,
                hold_s=hold_s,
                **sampling,
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
                Echo(one, tuple(tokenizer.encode(one)) if told else ())
                if isinstance(one, str)
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
            headers["x-dflash2-ignored-fields"] = names.encode("unicode_escape").decode()[
                :1000
            ]  # no control character may stand in a header
        return headers

    # ---- tokens -----------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        return tokenize(self._text, await json_body(request), self._max_model_len)

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """The text of token ids."""
        return detokenize(self._text, await json_body(request), self._vocab_size)

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
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "dflash2_ray",
            "root": self._model,
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
            return JSONResponse(
                plain_error(str(error), "server_error", None, "service_unavailable"), 503, headers={"Retry-After": "1"}
            )


def _are_ids(ids: Any) -> bool:
    """Whether these can be token ids; whether they are is the engine's to say."""
    return all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in ids)
