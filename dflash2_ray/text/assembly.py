"""From step deltas to chunks of text and, at the end, a `Generation`. One assembler per request.

Stop strings end a text here, at the very token that completes one: what the engine brought behind it is not delivered and not
counted. Whoever drives the engine cancels a request whose chunk has a finish reason that its delta had not.
"""

import time
from dataclasses import replace
from typing import Any

from dflash2_ray.core.generation import Generation, GenerationChunk, Usage
from dflash2_ray.core.messages import RequestDelta, SpeculationStats, TokenLogprobs, cut_steps
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.text.detokenizer import Detokenizer
from dflash2_ray.text.stop_matcher import StopMatcher
from dflash2_ray.text.tokenizer import Tokenizer
from dflash2_ray.text.tool_calls import read_calls
from dflash2_ray.text.tools import ToolUse


class TextAssembler:
    """`started`: `time.perf_counter()` when the request was submitted; tools: what the text may call."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request_id: str,
        num_prompt_tokens: int,
        started: float,
        params: SamplingParams | None = None,
        tools: ToolUse | None = None,
    ) -> None:
        self._params = params or SamplingParams()
        self._tools = tools
        self._detokenizer = Detokenizer(tokenizer, self._params.skip_special_tokens)
        self._stops = (
            StopMatcher(self._params.stop, self._params.include_stop_str_in_output) if self._params.stop else None
        )
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._started = started
        self._first_token: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._stats: SpeculationStats | None = None
        self._text: list[str] = []

    def push(self, delta: RequestDelta) -> GenerationChunk:
        """The chunk that `delta` brings. A stop token's own text is left out unless asked for; its id stays in `token_ids`."""
        if self._first_token is None and delta.token_ids:
            self._first_token = time.perf_counter()
            self._num_cached_tokens = delta.num_cached_tokens
        text, count, stop = self._show(delta)
        if stop is not None:
            delta = replace(
                delta,
                token_ids=delta.token_ids[:count],
                finish_reason="stop",
                steps=cut_steps(delta.steps, len(delta.token_ids) - count),
            )
        self._token_ids.extend(delta.token_ids)
        logprobs = None if delta.logprobs is None else delta.logprobs[:count]
        self._logprobs.extend(logprobs or ())
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._count(delta)
        self._text.append(text)
        usage = Usage(self._num_prompt_tokens, len(self._token_ids), self._num_cached_tokens)
        generation = (
            self._generation(delta, usage, delta.stop_reason if stop is None else stop)
            if delta.finish_reason is not None
            else None
        )
        return GenerationChunk(
            self._request_id,
            text,
            tuple(delta.token_ids),
            usage,
            delta.finish_reason,
            generation,
            logprobs,
            delta.prompt_logprobs,
            delta.skipped_reason,
        )

    def _show(self, delta: RequestDelta) -> tuple[str, int, str | None]:
        """(text to show, tokens of the delta that are delivered, the stop string that ended it)."""
        hidden = delta.stop_reason is not None and not self._params.include_stop_str_in_output
        shown = delta.token_ids[:-1] if hidden else delta.token_ids
        if self._stops is None:
            text = self._detokenizer.push(shown)
            return (
                text + (self._detokenizer.finish() if delta.finish_reason is not None else ""),
                len(delta.token_ids),
                None,
            )
        pieces = []
        for index, token_id in enumerate(shown):  # one by one: the token that completes a stop string is the last one
            last = delta.finish_reason is not None and index == len(shown) - 1
            new = self._detokenizer.push([token_id]) + (self._detokenizer.finish() if last else "")
            piece, stop = self._stops.push(new, armed=len(self._token_ids) + index >= self._params.min_tokens)
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), index + 1, stop
        if delta.finish_reason is not None:
            pieces.append(self._stops.push(self._detokenizer.finish(), armed=False)[0] + self._stops.finish())
        return "".join(pieces), len(delta.token_ids), None

    def _count(self, delta: RequestDelta) -> None:
        if self._stats is None:
            self._stats = SpeculationStats(delta.num_speculative_tokens)
        self._stats.skipped_reason = delta.skipped_reason
        for step in delta.steps:
            self._stats.record(*step)

    def _generation(self, delta: RequestDelta, usage: Usage, stop_reason: int | str | None) -> Generation:
        now = time.perf_counter()
        first = now if self._first_token is None else self._first_token
        count = len(self._token_ids)
        timing = {
            "time_to_first_token_s": first - self._started,
            "time_per_output_token_s": (now - first) / (count - 1) if count > 1 else None,
            "end_to_end_s": now - self._started,
        }
        assert self._stats is not None, "every push counts"
        text = "".join(self._text)
        return Generation(
            request_id=self._request_id,
            text=text,
            tool_calls=self._calls(text),
            token_ids=self._token_ids,
            finish_reason=delta.finish_reason or "stop",
            stop_reason=stop_reason,
            usage=usage,
            logprobs=self._logprobs if self._params.logprobs is not None else None,
            prompt_logprobs=list(self._prompt_logprobs) if self._prompt_logprobs is not None else None,
            metrics={"speculative_decoding": self._stats.as_dict(), "timing": timing},
        )

    def _calls(self, text: str) -> list[dict[str, Any]] | None:
        if self._tools is None:
            return None
        return read_calls([text], self._request_id, self._tools.max_calls)[1]
