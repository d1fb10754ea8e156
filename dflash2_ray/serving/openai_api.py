"""The OpenAI wire format: request bodies checked field by field, response bodies, error bodies.

Every field is offered, has a neutral value that changes nothing, is refused by name, or (unknown here) is reported as ignored:
nothing is silently dropped. `options.py` holds the table.
It must not know Serve or engines.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash2_ray.core.generation import Generation, Usage
from dflash2_ray.errors import InvalidRequest, RequestError, UnknownModel, http_error
from dflash2_ray.serving.logprobs import LogprobsFormat
from dflash2_ray.serving.options import BY_NAME, options_of
from dflash2_ray.text.short import short
from dflash2_ray.text.text_side import TOOL_FIELDS, callable_tools, tool_use
from dflash2_ray.text.tool_calls import read_calls
from dflash2_ray.text.tools import ToolUse

SPECULATIVE_HEADER = "x-dflash2-speculative"


@dataclass(frozen=True)
class ApiRequest:
    """One checked body. prompts: texts or token ids (completions); messages: chat. sampling: keywords of SamplingParams.
    logprobs: alternatives per token, None without. ignored: fields that nobody here knows."""

    chat: bool
    prompts: tuple[Any, ...]
    messages: list[Any] | None
    sampling: dict[str, Any]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_meta_info: bool
    tokens_as_ids: bool
    echo: bool
    logprobs: int | None
    ignored: tuple[str, ...]

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that may be called; None where calls are not looked for. Raises InvalidRequest."""
        return callable_tools(tool_use(self.sampling)[0])

    @property
    def num_choices(self) -> int:
        """Choices per prompt, of a checked request."""
        return int(self.sampling.get("n", 1))


def read_request(
    body: Any, header: str | None, *, chat: bool, served_model: str, strict: bool = False, max_width: int = 2**31
) -> ApiRequest:
    """Check a parsed body. `header`: the speculative header; `strict`: unknown fields are refused; max_width: draft slots that can be
    had. Raises InvalidRequest or UnknownModel, naming the field."""
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"the body must be a JSON object, got {type(body).__name__}")
    ignored = _refuse_unoffered(body, chat)
    if ignored and strict:
        raise InvalidRequest(f"unknown fields: {', '.join(ignored)} (strict_fields is on)", param=ignored[0])
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest(f"model must be a string, got {short(model)}", param="model")
    if model is not None:
        check_model(model, served_model)
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping) or set(options) - {"include_usage", "continuous_usage_stats"}:
        raise InvalidRequest(
            f"stream_options may hold include_usage and continuous_usage_stats, got {short(options)}",
            param="stream_options",
        )
    stream = flag(body, "stream")
    if options and not stream:
        raise InvalidRequest("stream_options needs stream=true", param="stream_options")
    sampling = {
        name: value for name, value in body.items() if value is not None and name in BY_NAME and BY_NAME[name].sampling
    }
    sampling |= {name: body[name] for name in ("response_format", *TOOL_FIELDS) if body.get(name) is not None}
    logprobs, echo = _logprobs(body, chat), flag(body, "echo")
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo:
            sampling["prompt_logprobs"] = logprobs
    if chat and body.get("max_completion_tokens") is not None:
        if sampling.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens contradict each other", param="max_completion_tokens"
            )
        sampling["max_tokens"] = body["max_completion_tokens"]
    if not chat:
        sampling.setdefault("max_tokens", 16)  # OpenAI's default for completions
    width = _speculative(body.get("speculative"), header, max_width)
    if width is not None:
        sampling["num_speculative_tokens"] = width
    return ApiRequest(
        chat=chat,
        prompts=() if chat else _prompts(body.get("prompt")),
        messages=_messages(body.get("messages")) if chat else None,
        sampling=sampling,
        stream=stream,
        include_usage=flag(options, "include_usage"),
        continuous_usage=flag(options, "continuous_usage_stats"),
        return_token_ids=flag(body, "return_token_ids"),
        return_meta_info=flag(body, "return_meta_info"),
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        echo=echo,
        logprobs=logprobs,
        ignored=ignored,
    )


def check_model(name: str, served_model: str) -> None:
    """Raises UnknownModel unless it is the one that is served."""
    if name != served_model:
        raise UnknownModel(f"model {short(name)} is not served here; expected {served_model!r}")


def _refuse_unoffered(body: Mapping[str, Any], chat: bool) -> tuple[str, ...]:
    """Refuse every field that is known and not offered on this route; returns those that are not known."""
    offered = options_of("chat" if chat else "completions")
    refused, ignored = [], []
    for name, value in body.items():
        option = BY_NAME.get(name)
        if option is None:
            ignored.append(str(name))
        elif value is None or any(_same(value, neutral) for neutral in option.neutral):
            continue
        elif name not in offered or option.kind == "refused":
            refused.append(name)
    if refused:
        raise InvalidRequest(
            f"not offered: {', '.join(sorted(refused))}; nothing was generated", param=sorted(refused)[0]
        )
    return tuple(sorted(name for name in ignored if body[name] is not None))


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    """Alternatives per token: chat asks by a flag and `top_logprobs`, completions by a number."""
    value, top = body.get("logprobs"), body.get("top_logprobs")
    if not chat:
        if isinstance(value, bool) or (value is not None and not isinstance(value, int)):
            raise InvalidRequest(f"logprobs must be an integer in [0, 20], got {short(value)}", param="logprobs")
        return value
    asked = flag(body, "logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20):
        raise InvalidRequest(f"top_logprobs must be an integer in [0, 20], got {short(top)}", param="top_logprobs")
    if top and not asked:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    return (top or 0) if asked else None


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; null means omitted. Raises InvalidRequest."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {short(value)}", param=name)
    return value


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"messages must be a non-empty list, got {short(value)}", param="messages")
    return value


def _prompts(value: Any) -> tuple[Any, ...]:
    """Texts or lists of token ids; one entry per choice."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return tuple(value)
        if all(isinstance(one, list) for one in value):
            return tuple(value)
        if not any(isinstance(one, (str, list, dict)) or one is None for one in value):
            return (value,)
    raise InvalidRequest(
        f"prompt must be a string, a list of strings, a list of token ids, or a list of such lists, none empty; got {short(value)}",
        param="prompt",
    )


def _speculative(value: Any, header: str | None, most: int) -> int | None:
    """Draft slots that the request asks for: 0 is off, None as configured. The body wins over the header. More than `most` are
    clamped later, and refused here if the request is strict about it."""
    if value is not None:
        if not isinstance(value, Mapping) or set(value) - {"enabled", "num_speculative_tokens", "strict"}:
            raise InvalidRequest(
                f"speculative may hold enabled, num_speculative_tokens and strict, got {short(value)}",
                param="speculative",
            )
        for name in ("enabled", "strict"):
            if value.get(name) is not None and not isinstance(value[name], bool):
                raise InvalidRequest(
                    f"speculative.{name} must be true or false, got {short(value[name])}", param=f"speculative.{name}"
                )
        width = value.get("num_speculative_tokens")
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 0):
            raise InvalidRequest(
                f"speculative.num_speculative_tokens must be an integer from 0, got {short(width)}",
                param="speculative.num_speculative_tokens",
            )
        if value.get("strict") and value.get("enabled") is not False and (width or 0) > most:
            raise InvalidRequest(
                f"speculative.num_speculative_tokens is at most {most} here, got {width} (speculative.strict is on)",
                param="speculative.num_speculative_tokens",
            )
        return 0 if value.get("enabled") is False else width
    if header is None or header.strip() == "on":
        return None
    text = header.strip()
    if text == "off":
        return 0
    if text.startswith("k=") and text[2:].isascii() and text[2:].isdigit():
        return int(text[2:])
    raise InvalidRequest(
        f"header {SPECULATIVE_HEADER} must be off, on or k=N, got {short(header)}", param=SPECULATIVE_HEADER
    )


# ---- responses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Echo:
    """A prompt that is given back in front of its completion."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Envelope:
    """What every body of one response repeats."""

    request_id: str
    model: str
    chat: bool
    created: int

    @classmethod
    def new(cls, request_id: str, model: str, chat: bool) -> "Envelope":
        return cls(request_id, model, chat, int(time.time()))

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}"

    def head(self, *, streaming: bool) -> dict[str, Any]:
        """id, object, created, model."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if streaming else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def response_body(
    envelope: Envelope, generations: list[Generation], asked: ApiRequest, logprobs: LogprobsFormat, echoes: list[Echo]
) -> dict[str, Any]:
    """A whole response. With several choices `metrics` is that of each choice, else of the response. echoes: the prompt of each
    choice, empty without `echo`."""
    choices = []
    use = asked.tool_use
    for index, generation in enumerate(generations):
        echo = echoes[index]
        told = None
        if generation.logprobs is not None:
            ids, entries = (
                [*echo.token_ids, *generation.token_ids],
                [*(generation.prompt_logprobs or ()), *generation.logprobs],
            )
            told = logprobs.of(ids, entries)
        choice: dict[str, Any] = {"index": index, "finish_reason": generation.finish_reason, "logprobs": told}
        choice["stop_reason"] = generation.stop_reason
        if envelope.chat:
            choice["message"] = {"role": "assistant", "content": generation.text}
            if use is not None:
                content, calls = read_calls([generation.text], f"{envelope.id}-{index}", use.max_calls)
                choice["message"] |= {"content": content, **({"tool_calls": calls} if calls else {})}
                choice["finish_reason"] = finish_reason_of(generation.finish_reason, bool(calls))
        else:
            choice["text"] = echo.text + generation.text
        if asked.return_token_ids:
            choice["token_ids"] = generation.token_ids
        if asked.return_meta_info:
            choice["meta_info"] = meta_info(generation)
        if len(generations) > 1:
            choice["metrics"] = generation.metrics
        choices.append(choice)
    body = {**envelope.head(streaming=False), "choices": choices, "usage": usage_of(generations, asked.num_choices)}
    if len(generations) == 1:
        body["metrics"] = generations[0].metrics
        if asked.return_meta_info:
            body["meta_info"] = meta_info(generations[0])
    return body


def meta_info(generation: Generation) -> dict[str, Any]:
    """SGLang's `meta_info` of a choice: its acceptance length is completion tokens per verify step, the first token included."""
    stats = generation.metrics["speculative_decoding"]
    tokens, steps = generation.usage.completion_tokens, stats["num_spec_steps"] + stats["num_plain_steps"]
    return {
        "id": generation.request_id,
        "finish_reason": {"type": generation.finish_reason},
        "prompt_tokens": generation.usage.prompt_tokens,
        "completion_tokens": tokens,
        "cached_tokens": generation.usage.cached_tokens,
        "e2e_latency": generation.metrics["timing"]["end_to_end_s"],
        "spec_verify_ct": steps,
        "spec_accept_length": tokens / steps if steps else None,
        "spec_accept_rate": stats["draft_acceptance_rate"],
        "spec_num_correct_drafts": stats["num_accepted_draft_tokens"],
        "spec_num_proposed_drafts": stats["num_draft_tokens"],
        "spec_correct_drafts_histogram": stats["acceptance_histogram"],
    }


def finish_reason_of(reason: str, called: bool) -> str:
    """An answer that stopped by itself and calls a tool says so."""
    return "tool_calls" if called and reason == "stop" else reason


def usage_of(generations: list[Generation], num_choices: int) -> dict[str, Any]:
    """The `usage` object over all choices; a prompt counts once, however many choices it has."""
    prompt = sum(generation.usage.prompt_tokens for generation in generations[::num_choices])
    completion = sum(generation.usage.completion_tokens for generation in generations)
    cached = sum(generation.usage.cached_tokens for generation in generations[::num_choices])
    return Usage(prompt, completion, cached).as_dict()


def chunk_choice(
    envelope: Envelope, index: int, text: str, finish_reason: str | None = None, *, first: bool = False
) -> dict[str, Any]:
    """One choice of a stream chunk."""
    choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
    if not envelope.chat:
        return {**choice, "text": text}
    delta: dict[str, Any] = {"role": "assistant", "content": text} if first else ({"content": text} if text else {})
    return {**choice, "delta": delta}


def error_body(
    error: BaseException, request_id: str, *, chat: bool = False
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error, by the one table in `errors`. chat: the prompt came as messages."""
    row = http_error(error)
    message = row.message or str(error)
    if row.message is not None:
        message = f"{row.message} Request id: {request_id}."
    code, param = row.code, None
    if isinstance(error, RequestError):
        param, code = "messages" if chat and error.param == "prompt" else error.param, error.code or row.code
    headers = {}
    retry = getattr(error, "retry_after_s", 1.0 if row.status == 503 else None)
    if retry is not None:
        headers = {"Retry-After": str(max(1, round(retry))), "retry-after-ms": str(int(retry * 1000))}
    if row.status == 504:
        headers["x-should-retry"] = "false"  # it would take as long again
    return row.status, plain_error(message, row.type, param, code), headers


def plain_error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
