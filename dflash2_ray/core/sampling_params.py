"""What one request asks of sampling, validated once. Field names are the HTTP field names.

Nothing behind this file re-checks a value. It must not know tensors, tokenizers or HTTP.
"""

from dataclasses import dataclass, fields
from typing import Any

from dflash2_ray.errors import InvalidRequest

MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-5  # a temperature below this is greedy


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request; every one is exact under speculation.

    temperature: 0 (or anything below 1e-5) is greedy. top_p in (0, 1]. top_k 0 or -1: off. min_p in [0, 1].
    max_tokens: None means up to the context limit. num_speculative_tokens: None means as configured, 0 means plain.
    Raises InvalidRequest, naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, low_open=True)
        _integer(self, "top_k", -1, 2**31 - 1)
        _number(self, "min_p", 0.0, 1.0)
        if self.seed is not None:
            _integer(self, "seed", -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1, 2**63)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {self.ignore_eos!r}", param="ignore_eos")
        if self.num_speculative_tokens is not None:
            _integer(self, "num_speculative_tokens", 0, 2**31 - 1)
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise InvalidRequest(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}", param="stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise InvalidRequest(
                    f"stop_token_ids must hold token ids (integers from 0), got {token_id!r}", param="stop_token_ids"
                )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))
        object.__setattr__(self, "min_p", float(self.min_p))
        object.__setattr__(self, "top_k", max(0, self.top_k))

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
