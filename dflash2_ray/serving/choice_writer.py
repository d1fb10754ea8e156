"""The chunks of one choice of a stream, in the shapes of the OpenAI API. It must not know engines."""

from typing import Any

from dflash2_ray.core.generation import GenerationChunk
from dflash2_ray.serving.openai_api import Envelope, chunk_choice, finish_reason_of
from dflash2_ray.text.tool_calls import ContentDelta, Event, ToolCallParser
from dflash2_ray.text.tools import ToolUse


class ChoiceWriter:
    """Completions carry the finish reason on the last text, chat on an empty delta behind it. use: tools that may be called."""

    def __init__(self, envelope: Envelope, index: int, use: ToolUse | None) -> None:
        self._envelope = envelope
        self._index = index
        self._parser = ToolCallParser(f"{envelope.id}-{index}", use.max_calls) if use is not None else None
        self._called = False

    def choices(self, chunk: GenerationChunk, text: str) -> list[dict[str, Any]]:
        """One `choices` entry per event to send; text: the chunk's own, with what is put in front of it."""
        reason = chunk.finish_reason
        if not self._envelope.chat:
            choice = chunk_choice(self._envelope, self._index, text, reason)
            if chunk.generation is not None:
                choice["stop_reason"] = chunk.generation.stop_reason
            return [choice]
        choices = [self._choice(event) for event in self._events(text, reason is not None)]
        if not choices and reason is None:
            choices.append(chunk_choice(self._envelope, self._index, ""))
        if reason is not None and chunk.generation is not None:
            last = chunk_choice(self._envelope, self._index, "", finish_reason_of(reason, self._called))
            choices.append({**last, "stop_reason": chunk.generation.stop_reason})
        return choices

    def _events(self, text: str, ends: bool) -> list[Event]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        return [*self._parser.push(text), *(self._parser.finish() if ends else ())]

    def _choice(self, event: Event) -> dict[str, Any]:
        if isinstance(event, ContentDelta):
            return chunk_choice(self._envelope, self._index, event.text)
        self._called = True
        return {**chunk_choice(self._envelope, self._index, ""), "delta": {"tool_calls": [event.to_openai()]}}
