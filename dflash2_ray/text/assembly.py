"""From step deltas to chunks of text and, at the end, a `Generation`. One assembler per request."""

import time

from dflash2_ray.core.generation import Generation, GenerationChunk, Usage
from dflash2_ray.core.messages import RequestDelta
from dflash2_ray.text.detokenizer import Detokenizer
from dflash2_ray.text.tokenizer import Tokenizer


class TextAssembler:
    """`started`: `time.perf_counter()` when the request was submitted."""

    def __init__(self, tokenizer: Tokenizer, request_id: str, num_prompt_tokens: int, started: float) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._started = started
        self._first_token: float | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []

    def push(self, delta: RequestDelta) -> GenerationChunk:
        """The chunk that `delta` brings. A stop token's own text is left out; its id stays in `token_ids`."""
        if self._first_token is None and delta.token_ids:
            self._first_token = time.perf_counter()
        self._token_ids.extend(delta.token_ids)
        shown = delta.token_ids if delta.stop_reason is None else delta.token_ids[:-1]
        text = self._detokenizer.push(shown)
        if delta.finish_reason is not None:
            text += self._detokenizer.finish()
        self._text.append(text)
        usage = Usage(self._num_prompt_tokens, len(self._token_ids))
        generation = self._generation(delta, usage) if delta.finish_reason is not None else None
        return GenerationChunk(self._request_id, text, tuple(delta.token_ids), usage, delta.finish_reason, generation)

    def _generation(self, delta: RequestDelta, usage: Usage) -> Generation:
        now = time.perf_counter()
        first = now if self._first_token is None else self._first_token
        count = len(self._token_ids)
        timing = {
            "time_to_first_token_s": first - self._started,
            "time_per_output_token_s": (now - first) / (count - 1) if count > 1 else None,
            "end_to_end_s": now - self._started,
        }
        return Generation(
            request_id=self._request_id,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=delta.finish_reason or "stop",
            stop_reason=delta.stop_reason,
            usage=usage,
            metrics={"speculative_decoding": delta.stats, "timing": timing},
        )
