"""The result of one generation, the same for `LLM`, `Client` and (as JSON) HTTP."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Usage:
    """Token counts of one generation. cached_tokens: of the prompt, those whose keys and values were found in the prefix cache; it is no
    part of what was generated, so two counts that differ in it alone are equal."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(default=0, compare=False)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, Any]:
        """The OpenAI `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Generation:
    """One finished generation.

    finish_reason: `stop` or `length`. stop_reason: the stop string or stop token id that ended it, None for end-of-text and limits.
    logprobs: where asked for, one (log-probability, ((token id, log-probability), …)) per token, of the target's own distribution;
    prompt_logprobs: the same per prompt token, None for the first. tool_calls: where tools were given, the calls in `text`, in the
    form of the HTTP API. metrics: the `metrics` object of an HTTP response, so
    `metrics["speculative_decoding"]["acceptance_histogram"]`, and times in seconds under `metrics["timing"]`.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    usage: Usage
    logprobs: list[Any] | None = None
    prompt_logprobs: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """One piece of a stream: the text that may be shown now and the tokens behind it (text may lag tokens while a
    character is incomplete). `usage` counts up to and with this piece; `finish_reason` and `generation` come with the last.
    logprobs: as in `Generation`, of these tokens; prompt_logprobs: with the first chunk. skipped_reason: why the request does not
    speculate (any more)."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: str | None = None
    generation: Generation | None = None
    logprobs: tuple[Any, ...] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    skipped_reason: str | None = None
