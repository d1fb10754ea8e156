"""`Client`: the running service from Python, through Ray, without HTTP. The ingress uses the same class.

It tokenises, sends one Ray call per request to a unit, and turns deltas into text. It must not know HTTP.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import BackPressureError, RayServeException

from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.wire import pack_spec, unpack_delta, unpack_error
from dflash2_ray.errors import Overloaded, StepFailed, UnitLost
from dflash2_ray.text.assembly import TextAssembler
from dflash2_ray.text.text_side import Messages, TextSide

UNIT_DEPLOYMENT = "unit"


class Client:
    """`Client(app_name="default")`, with Ray initialised (`ray.init(address="auto")` or inside a cluster).

    `generate` and `stream` block; `agenerate` and `astream` are for event loops. Sampling keywords have the names of the
    HTTP fields. Errors are those of `dflash2_ray.errors`.
    """

    def __init__(self, app_name: str = "default", *, generation_config: str = "auto") -> None:
        self._handle = serve.get_deployment_handle(UNIT_DEPLOYMENT, app_name=app_name)
        self._generation_config = generation_config
        self._text: TextSide | None = None

    @classmethod
    def from_handle(cls, handle: Any, generation_config: str) -> "Client":
        """The ingress's way in: a handle that Serve bound for it."""
        client = cls.__new__(cls)
        client._handle, client._generation_config, client._text = handle, generation_config, None
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
        streams = [
            self.stream(one, messages=chat, prompt_token_ids=ids, **sampling)
            for one, chat, ids in _each(prompt, messages, prompt_token_ids)
        ]
        return [_last(list(stream)) for stream in streams]

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Iterator[GenerationChunk]:
        """Chunks of one generation; submitted at once. Closing the iterator cancels the request."""
        if self._text is None:
            self._text = TextSide.from_files(_call(lambda: self._handle.text_files.remote().result()), self._generation_config)
        spec, assembler = self._prepare(prompt, messages, prompt_token_ids, sampling, None)
        response = self._handle.options(stream=True).generate.remote(pack_spec(spec))
        return self._chunks(response, assembler)

    @staticmethod
    def _chunks(response: Any, assembler: TextAssembler) -> Iterator[GenerationChunk]:
        finished = False
        try:
            while not finished:
                item = _call(lambda: next(response, None))
                chunk = _decode(item, assembler)
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                response.cancel()

    # ---- asyncio ----------------------------------------------------------------------------------------------------

    async def text(self) -> TextSide:
        """Tokenizer and template of the served target, fetched once."""
        if self._text is None:
            try:
                files = await self._handle.text_files.remote()
            except (ray.exceptions.RayError, RayServeException) as error:
                raise _translated(error) from None
            self._text = TextSide.from_files(files, self._generation_config)
        return self._text

    async def describe(self) -> dict[str, Any]:
        """What runs, and how full it is. Raises UnitLost."""
        try:
            return dict(await self._handle.describe.remote())
        except (ray.exceptions.RayError, RayServeException) as error:
            raise _translated(error) from None

    async def agenerate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Like `generate`, awaited."""
        async def one(text: Any, chat: Any, ids: Any) -> Generation:
            stream = self.astream(text, messages=chat, prompt_token_ids=ids, **sampling)
            return _last([chunk async for chunk in stream])

        return list(await asyncio.gather(*(one(*part) for part in _each(prompt, messages, prompt_token_ids))))

    async def astream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> AsyncIterator[GenerationChunk]:
        """Chunks of one generation, submitted when the iteration starts; closing or cancelling it cancels the request."""
        await self.text()
        spec, assembler = self._prepare(prompt, messages, prompt_token_ids, sampling, request_id)
        response: Any = self._handle.options(stream=True).generate.remote(pack_spec(spec))
        finished = False
        try:
            while not finished:
                try:
                    item = await anext(response, None)
                except (ray.exceptions.RayError, RayServeException, BackPressureError) as error:
                    raise _translated(error) from None
                chunk = _decode(item, assembler)
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                response.cancel()

    # ---- both -------------------------------------------------------------------------------------------------------

    def _prepare(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: Sequence[int] | None,
        sampling: Mapping[str, Any],
        request_id: str | None,
    ) -> tuple[RequestSpec, TextAssembler]:
        assert self._text is not None, "text files are fetched first"
        ids = self._text.prompt_ids(prompt, token_ids, messages)
        params = self._text.params(sampling)
        request_id = request_id or f"client-{uuid.uuid4().hex}"
        assembler = TextAssembler(self._text.tokenizer, request_id, len(ids), started=time.perf_counter())
        return RequestSpec(request_id, tuple(ids), params), assembler


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


def _decode(item: dict[str, Any] | None, assembler: TextAssembler) -> GenerationChunk:
    if item is None:
        raise UnitLost("the stream ended early")
    if "refused" in item:
        raise unpack_error(item["refused"])
    delta = unpack_delta(item)
    if delta.finish_reason == "error":
        raise StepFailed(delta.error or "the step failed")
    return assembler.push(delta)


def _call(action: Any) -> Any:
    try:
        return action()
    except (ray.exceptions.RayError, RayServeException, BackPressureError) as error:
        raise _translated(error) from None


def _translated(error: Exception) -> Exception:
    """Ray's errors as ours: back-pressure is an overload, anything else means that the unit is gone."""
    if isinstance(error, BackPressureError):
        return Overloaded("the service is full; retry later")
    if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(error, ray.exceptions.RayActorError):
        cause = error.cause
        if isinstance(cause, UnitLost):
            return cause
    return UnitLost(f"the unit is gone: {type(error).__name__}")
