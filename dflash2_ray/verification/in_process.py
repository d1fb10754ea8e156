"""An engine in this process, asked with the bodies that a service would get: options go through the same reading."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.errors import RequestError, http_error
from dflash2_ray.serving.openai_api import ApiRequest, finish_reason_of, read_request, usage_of
from dflash2_ray.text.text_side import each_choice
from dflash2_ray.text.tool_calls import read_calls
from dflash2_ray.verification.answer import Answer, Choice, Prompt, TokenLogprobs, refusal
from dflash2_ray.verification.backend import Facts, request_body

if TYPE_CHECKING:
    from dflash2_ray.llm import LLM


class InProcess:
    """A `Backend`. Raises ConfigError when the engine has no drafter."""

    def __init__(self, engine: "LLM") -> None:
        self._engine = engine
        self.facts = Facts.of("in process", engine.describe())

    def close(self) -> None:
        """Release the models."""
        self._engine.close()

    def num_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        return [
            len(self._engine.chat_ids(_messages(one)) if one.chat else self._engine.tokenizer.encode(one.text))
            for one in prompts
        ]

    def answer(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        *,
        speculate: bool,
        in_flight: int,
        top_logprobs: int | None = None,
        stream: bool = False,
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for chat in (False, True):
            indices = [index for index, prompt in enumerate(prompts) if prompt.chat == chat]
            if indices:
                picked = [prompts[index] for index in indices]
                found = self._route(
                    picked, request_body(picked[0], options, speculate, top_logprobs), in_flight, stream
                )
                answers |= dict(zip(indices, found, strict=True))
        return [answers[index] for index in range(len(prompts))]

    def _route(self, prompts: Sequence[Prompt], body: Mapping[str, Any], in_flight: int, stream: bool) -> list[Answer]:
        """Prompts of one route; body: that of the first. When one is refused, each is asked alone."""
        try:
            asked = read_request(body, None, chat=prompts[0].chat, served_model=self.facts.model)
            if stream:
                return [self._streamed(prompt, asked) for prompt in prompts]
            return self._whole(prompts, asked, in_flight)
        except RequestError as error:
            if len(prompts) == 1:
                return [refusal(http_error(error).status, error.param, error.message)]
        key = "messages" if prompts[0].chat else "prompt"
        bodies = [{**body, key: _messages(one) if one.chat else one.text} for one in prompts]
        return [
            answer
            for prompt, one in zip(prompts, bodies, strict=True)
            for answer in self._route([prompt], one, in_flight, stream)
        ]

    def _whole(self, prompts: Sequence[Prompt], asked: ApiRequest, in_flight: int) -> list[Answer]:
        if asked.chat:
            generations = self._engine.chat(
                [_messages(one) for one in prompts], max_in_flight=in_flight, **asked.sampling
            )
        else:
            generations = self._engine.generate(
                [one.text for one in prompts], max_in_flight=in_flight, **asked.sampling
            )
        count = asked.num_choices
        return [
            self._answer(prompt, asked, generations[index * count : (index + 1) * count], None)
            for index, prompt in enumerate(prompts)
        ]

    def _streamed(self, prompt: Prompt, asked: ApiRequest) -> Answer:
        generations, pieces = [], []
        for sampling in each_choice(asked.sampling):
            if asked.chat:
                chunks = list(self._engine.stream(messages=_messages(prompt), **sampling))
            else:
                chunks = list(self._engine.stream(prompt.text, **sampling))
            generation = chunks[-1].generation
            assert generation is not None, "a stream ends with its generation"
            pieces.append([chunk.text for chunk in chunks])
            generations.append(_joined(generation, chunks))
        return self._answer(prompt, asked, generations, pieces)

    def _answer(
        self, prompt: Prompt, asked: ApiRequest, generations: Sequence[Generation], pieces: Sequence[list[str]] | None
    ) -> Answer:
        """pieces: the texts of each choice's chunks, where they were streamed."""
        choices = []
        for index, generation in enumerate(generations):
            text, reason = generation.text, generation.finish_reason
            calls: tuple[tuple[str, str], ...] = ()
            if asked.tool_use is not None:
                content, found = read_calls(pieces[index] if pieces else [text], "verify", asked.tool_use.max_calls)
                text, calls = (
                    content or "",
                    tuple((call["function"]["name"], call["function"]["arguments"]) for call in found),
                )
                reason = finish_reason_of(reason, bool(calls))
            told = None
            if generation.logprobs is not None:
                told = _logprobs([*(generation.prompt_logprobs or ()), *generation.logprobs])
            choices.append(
                Choice(
                    prompt.text + text if asked.echo else text,
                    tuple(generation.token_ids),
                    reason,
                    generation.stop_reason,
                    calls,
                    told,
                )
            )
        accepted = sum(one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for one in generations)
        return Answer(tuple(choices), usage_of(list(generations), len(generations)), accepted)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt.text}]


def _joined(generation: Generation, chunks: Sequence[GenerationChunk]) -> Generation:
    """The generation as its chunks tell it."""
    prompt_logprobs = next((list(chunk.prompt_logprobs) for chunk in chunks if chunk.prompt_logprobs is not None), None)
    return Generation(
        request_id=generation.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        finish_reason=str(chunks[-1].finish_reason),
        stop_reason=generation.stop_reason,
        usage=chunks[-1].usage,
        logprobs=None if generation.logprobs is None else [one for chunk in chunks for one in chunk.logprobs or ()],
        prompt_logprobs=prompt_logprobs,
        metrics=generation.metrics,
    )


def _logprobs(entries: Iterable[Any]) -> tuple[TokenLogprobs, ...]:
    """Entries as in `Generation.logprobs`; None for a prompt's first token."""
    return tuple(
        (None, ()) if entry is None else (entry[0], tuple((int(token), float(value)) for token, value in entry[1]))
        for entry in entries
    )
