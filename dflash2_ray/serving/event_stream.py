"""Server-sent events of one response, in the shapes of the OpenAI API. It must not know engines."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.serving.access_log import log_answer
from dflash2_ray.serving.choice_writer import ChoiceWriter
from dflash2_ray.serving.failures import failure
from dflash2_ray.serving.logprobs import LogprobsFormat
from dflash2_ray.serving.openai_api import ApiRequest, Echo, Envelope, chunk_choice, usage_of

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """echoes: what stands in front of each choice, one entry per choice."""

    def __init__(self, asked: ApiRequest, envelope: Envelope, logprobs: LogprobsFormat, echoes: list[Echo]) -> None:
        self._asked, self._envelope, self._logprobs, self._echoes = asked, envelope, logprobs, echoes
        self._generations: dict[int, Generation] = {}
        self._offsets = [-1] * len(echoes)  # characters of each choice that its log-probabilities cover; -1: none yet
        self._writers = [ChoiceWriter(envelope, index, asked.tool_use) for index in range(len(echoes))]
        self._head = envelope.head(streaming=True)
        self._usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}

    async def pieces(self, chunks: AsyncGenerator[tuple[int, GenerationChunk], None]) -> AsyncGenerator[str, None]:
        """What to send, one piece per (choice index, chunk): the role goes with the first, everything behind the text with the last. An
        error is an event too."""
        piece = self._begin()
        try:
            async with aclosing(chunks):
                async for index, chunk in chunks:
                    piece += self._of(index, chunk)
                    if len(self._generations) < len(self._echoes):
                        yield piece
                        piece = ""
            piece += self._end()
        except Exception as error:
            piece += _event(failure(error, self._envelope.request_id, chat=self._envelope.chat)[1])
        yield f"{piece}data: [DONE]\n\n"

    def _begin(self) -> str:
        roles = range(len(self._echoes)) if self._envelope.chat else ()
        return "".join(
            _event({**self._head, "choices": [chunk_choice(self._envelope, index, "", first=True)], **self._usage})
            for index in roles
        )

    def _of(self, index: int, chunk: GenerationChunk) -> str:
        if chunk.generation is not None:
            self._generations[index] = chunk.generation
        token_ids = list(chunk.token_ids)
        text, told = chunk.text, None
        ids, entries = token_ids, [*(chunk.logprobs or ())]
        if self._offsets[index] < 0:  # the first of its choice
            self._offsets[index], text = 0, self._echoes[index].text + text
            ids, entries = [*self._echoes[index].token_ids, *ids], [*(chunk.prompt_logprobs or ()), *entries]
        if self._asked.logprobs is not None and ids:
            told = self._logprobs.of(ids, entries, self._offsets[index])
            self._offsets[index] += self._logprobs.length(ids)
        events = []
        for choice in self._writers[index].choices(chunk, text):
            choice["logprobs"], told = told, None
            if self._asked.return_token_ids:
                choice["token_ids"], token_ids = token_ids, []  # each id once, in the first event of its chunk
            body = {**self._head, "choices": [choice], **self._usage}
            if self._asked.continuous_usage:
                body["usage"] = chunk.usage.as_dict()
            events.append(_event(body))
        return "".join(events)

    def _end(self) -> str:
        done = [self._generations[index] for index in range(len(self._echoes))]
        log_answer(self._envelope.request_id, done, chat=self._envelope.chat, streamed=True)
        if not self._asked.include_usage:
            return ""
        last = {**self._head, "choices": [], "usage": usage_of(done, self._asked.num_choices)}
        if len(done) == 1:
            last["metrics"] = done[0].metrics
        return _event(last)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
