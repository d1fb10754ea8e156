"""The first thing in which two answers to one request differ."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash2_ray.text.short import cut
from dflash2_ray.verification.answer import Answer, Choice, TokenLogprobs


@dataclass(frozen=True)
class Difference:
    """what: the part that differs; position: the first token that does, where tokens do; choice: index of the choice."""

    what: str
    one: Any
    other: Any
    position: int | None = None
    choice: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        place = (f" {self.position}" if self.position is not None else "") + (
            f" of choice {self.choice}" if self.choice else ""
        )
        return f"{self.what}{place}: {_short(self.one)}, got {_short(self.other)}"


def compare(one: Answer, other: Answer, tolerance: float) -> Difference | None:
    """`one` is what is right; tolerance: of log-probabilities. Tokens are looked at first: the rest follows from them."""
    if one.refused != other.refused:
        return Difference("refusal", one.refused, other.refused)
    if len(one.choices) != len(other.choices):
        return Difference("number of choices", len(one.choices), len(other.choices))
    for index, (first, second) in enumerate(zip(one.choices, other.choices, strict=True)):
        found = _compare(first, second, tolerance, index)
        if found is not None:
            return found
    counts = [
        {**answer.usage, "prompt_tokens_details": None} for answer in (one, other)
    ]  # what was cached is no part of an answer
    return None if counts[0] == counts[1] else Difference("usage", one.usage, other.usage)


def first_token(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part: the first position at which they differ or one of them has ended; None if they are the same."""
    if one == other:
        return None
    shared = min(len(one), len(other))
    return next((at for at in range(shared) if one[at] != other[at]), shared)


def _compare(one: Choice, other: Choice, tolerance: float, index: int) -> Difference | None:
    position = first_token(one.token_ids, other.token_ids)
    if position is not None:
        return Difference(
            "token", token_at(one.token_ids, position), token_at(other.token_ids, position), position, index
        )
    for what in ("text", "finish_reason", "stop_reason", "tool_calls"):
        first, second = getattr(one, what), getattr(other, what)
        if first != second or type(first) is not type(second):
            return Difference(what, first, second, choice=index)
    return _compare_logprobs(one.logprobs, other.logprobs, tolerance, index)


def _compare_logprobs(
    one: tuple[TokenLogprobs, ...] | None, other: tuple[TokenLogprobs, ...] | None, tolerance: float, index: int
) -> Difference | None:
    """By value: alternatives that are practically tied may change places."""
    if one is None or other is None or len(one) != len(other):
        same = one is None and other is None
        return None if same else Difference("number of logprobs", _length(one), _length(other), choice=index)
    for position, (first, second) in enumerate(zip(one, other, strict=True)):
        values = [[told[0], *sorted((value for _, value in told[1]), reverse=True)] for told in (first, second)]
        same = len(values[0]) == len(values[1]) and all(_near(a, b, tolerance) for a, b in zip(*values, strict=True))
        if not same:
            return Difference("logprobs", values[0], values[1], position, index)
    return None


def _length(told: tuple[TokenLogprobs, ...] | None) -> int | None:
    return None if told is None else len(told)


def _near(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is None and other is None
    return abs(one - other) <= tolerance


def token_at(token_ids: Sequence[int], position: int) -> int | None:
    """None behind the end."""
    return token_ids[position] if position < len(token_ids) else None


def _short(value: Any) -> str:
    return cut("the end" if value is None else repr(value), 60)
