"""What is asked and what comes back, the same for an engine in this process and for a service."""

from dataclasses import dataclass, field
from typing import Any

TokenLogprobs = tuple[float | None, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or (chat) one to answer."""

    chat: bool
    text: str


@dataclass(frozen=True)
class Choice:
    """One choice of an answer. tool_calls: (name, arguments) pairs. logprobs: (own, ((token id, log-probability), …)) per token, those
    of an echoed prompt first; None unless asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """All choices of one request. accepted: drafts accepted over them. refused: status and field of a refusal, which has no choices;
    message: what it says."""

    choices: tuple[Choice, ...] = ()
    usage: dict[str, Any] = field(default_factory=dict)
    accepted: int = 0
    refused: str | None = None
    message: str = ""


def refusal(status: int, param: str | None, message: str) -> Answer:
    """A request that was refused."""
    return Answer(refused=f"{status}, {param}" if param else str(status), message=message)
