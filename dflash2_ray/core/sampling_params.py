"""What one request asks of sampling, validated once. Field names are the HTTP field names.

Nothing behind this file re-checks a value. It must not know tensors, tokenizers or HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dflash2_ray.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # as OpenAI's chat API
MAX_CHOICES = 128
MAX_STOPS = 64
GREEDY_BELOW = 1e-5  # a temperature below this is greedy


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request; every one is exact under speculation.

    temperature: 0 (or anything below 1e-5) is greedy. top_p in (0, 1]. top_k 0 or -1: off. min_p in [0, 1].
    presence_penalty, frequency_penalty: taken from the logits of tokens in the output. repetition_penalty: divides positive and
    multiplies negative logits of tokens in prompt and output. logit_bias: {token id: what is added to its logit}.
    allowed_token_ids: nothing else is emitted. bad_words: texts whose token sequences are never completed
    (`bad_words_token_ids`, filled in from them with the tokenizer). grammar: what the output must match (filled in from
    `response_format` or `tools`). min_tokens: no stop of any kind before so many tokens.
    max_tokens: None means up to the context limit. stop: texts that end the output, left out of it unless
    include_stop_str_in_output. n: choices; choice i of a seeded request has seed + i.
    logprobs: None, or how many alternatives are told beside each emitted token (log-probabilities of the target's own
    distribution, before any option). prompt_logprobs: the same for the tokens of the prompt.
    num_speculative_tokens: None means as configured, 0 means plain. Raises InvalidRequest, naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, low_open=True)
        _integer(self, "top_k", -1, 2**31 - 1)
        _number(self, "min_p", 0.0, 1.0)
        if self.seed is not None:
            _integer(self, "seed", -(2**63), MAX_SEED)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.0, 100.0, low_open=True)
        _integer(self, "n", 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1, 2**63)
        _integer(self, "min_tokens", 0, 2**63)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens={self.max_tokens}", param="min_tokens"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(self, name, 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            _integer(self, "num_speculative_tokens", 0, 2**31 - 1)
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise InvalidRequest("grammar must be a string", param="response_format")
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            other = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(
                f"{other} contradicts response_format or tool_choice: an output ends where its form is complete",
                param=other,
            )
        set_ = object.__setattr__
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids must name at least one token id, got none", param="allowed_token_ids"
                )
        if not isinstance(self.bad_words_token_ids, (list, tuple)):
            raise InvalidRequest("bad_words_token_ids must be a list of lists of token ids", param="bad_words")
        set_(self, "bad_words_token_ids", tuple(_token_ids("bad_words", ids) for ids in self.bad_words_token_ids))
        set_(self, "logit_bias", _logit_bias(self.logit_bias))
        set_(self, "stop", _texts("stop", self.stop))
        set_(self, "bad_words", _texts("bad_words", self.bad_words))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            set_(self, name, float(getattr(self, name)))
        set_(self, "top_k", max(0, self.top_k))

    @property
    def shapes_logits(self) -> bool:
        """Whether anything changes the target's logits before temperature."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_token_ids
            or self.min_tokens
            or self.grammar is not None
        )

    @property
    def excluding_option(self) -> str | None:
        """The field to name when no token is left to emit."""
        given = {
            "response_format": self.grammar is not None,
            "allowed_token_ids": self.allowed_token_ids is not None,
            "min_tokens": bool(self.min_tokens),
            "bad_words": bool(self.bad_words_token_ids),
        }
        return next((name for name, is_given in given.items() if is_given), None)

    def choices(self) -> tuple["SamplingParams", ...]:
        """One set of options per choice, each with n=1; a seed counts up, so that choices differ and each can be asked for alone."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else self.seed + index for index in range(self.n)]
        return tuple(replace(self, n=1, seed=seed) for seed in seeds)

    @property
    def greedy(self) -> bool:
        """Whether the target's argmax is emitted."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_keywords(cls, **keywords: Any) -> "SamplingParams":
        """Build from user keywords; None means omitted. Raises InvalidRequest that names an unknown keyword."""
        known = {field.name for field in fields(cls)}
        for name in keywords:
            if name not in known:
                raise InvalidRequest(
                    f"unknown sampling option {name!r}; known options: {', '.join(sorted(known))}", param=name
                )
        return cls(**{name: value for name, value in keywords.items() if value is not None})


def _number(params: SamplingParams, name: str, low: float, high: float, *, low_open: bool = False) -> None:
    value = getattr(params, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (low_open and value == low):  # NaN fails the comparison
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}", param=name)


def _integer(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer in [{low}, {high}], got {value!r}", param=name)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} must be a list of token ids, got {value!r}", param=name)
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequest(f"{name} must hold token ids (integers from 0), got {token_id!r}", param=name)
    return tuple(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A text (an empty one asks for nothing), or a list of texts, none of them empty."""
    texts = ((value,) if value else ()) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
        raise InvalidRequest(f"{name} must be a string or a list of strings", param=name)
    if not all(texts) or len(texts) > MAX_STOPS:
        raise InvalidRequest(f"{name} may hold up to {MAX_STOPS} strings, none empty; got {len(texts)}", param=name)
    return tuple(texts)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """{token id, as a number or in digits: bias} as pairs in order of the ids."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, list, tuple)) or not all(
        isinstance(one, (list, tuple)) and len(one) == 2 for one in pairs
    ):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = int(key) if digits else key
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequest(
                f"logit_bias: token ids are integers from 0, got {str(key)[:80]!r}", param="logit_bias"
            )
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias[{token_id}] must be a number in [-100, 100], got {str(bias)[:80]!r}", param="logit_bias"
            )
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))
