"""Greedy identity: plain decoding alone against plain in company, speculative alone and speculative in company.

Where a text differs, the plain margin (top-1 minus top-2 log-probability) at the first difference says whether two tokens were
practically tied there.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash2_ray.verification.answer import Answer, Prompt
from dflash2_ray.verification.backend import Backend
from dflash2_ray.verification.comparison import first_token, token_at

Told = Callable[[str], None]
RUNS = (
    ("plain, in company", False, True),
    ("speculative, alone", True, False),
    ("speculative, in company", True, True),
)
NUM_RUNS = 1 + len(RUNS)


@dataclass(frozen=True)
class Apart:
    """Where one text differs: prompt and position are indices, plain and got token ids (None: the text has ended)."""

    prompt: int
    position: int
    plain: int | None
    got: int | None
    margin: float


@dataclass(frozen=True)
class IdentityRun:
    """One run against plain decoding alone. refusals: requests that only one of the two runs refused."""

    name: str
    num_texts: int
    num_accepted: int
    speculative: bool
    differences: tuple[Apart, ...]
    num_refused: int = 0

    def passed(self, bound: float) -> bool:
        """Every first difference is at most `bound` wide, and what was to speculate did."""
        told = self.num_accepted > 0 or not self.speculative
        return told and not self.num_refused and all(one.margin <= bound for one in self.differences)

    @property
    def num_equal(self) -> int:
        return self.num_texts - len(self.differences) - self.num_refused

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "num_texts": self.num_texts,
            "num_equal": self.num_equal,
            "num_refused": self.num_refused,
            "num_accepted_draft_tokens": self.num_accepted,
            "differences": [asdict(one) for one in self.differences],
        }


@dataclass(frozen=True)
class Identity:
    """bound: the largest margin at which a difference is a tie."""

    bound: float
    runs: tuple[IdentityRun, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return all(run.passed(self.bound) for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "margin_bound": self.bound, "runs": [run.as_dict() for run in self.runs]}


def check_identity(
    backend: Backend,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    company: int,
    bound: float,
    told: Told = lambda name: None,
) -> Identity:
    """told: called with the name of each run before it starts. Raises ConfigError."""
    options = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    told("greedy: plain, alone")
    plain = backend.answer(prompts, options, speculate=False, in_flight=1, top_logprobs=2)
    runs = []
    for name, speculate, together in RUNS:
        told(f"greedy: {name}")
        got = backend.answer(prompts, options, speculate=speculate, in_flight=company if together else 1)
        runs.append(_run(name, plain, got, speculate))
    return Identity(bound, tuple(runs))


def _run(name: str, plain: Sequence[Answer], got: Sequence[Answer], speculative: bool) -> IdentityRun:
    apart, refused = [], 0
    for index, (one, other) in enumerate(zip(plain, got, strict=True)):
        if not one.choices or not other.choices:
            refused += 1
            continue
        wanted, found = one.choices[0].token_ids, other.choices[0].token_ids
        position = first_token(wanted, found)
        if position is not None:
            apart.append(
                Apart(index, position, token_at(wanted, position), token_at(found, position), _margin(one, position))
            )
    return IdentityRun(name, len(plain), sum(one.accepted for one in got), speculative, tuple(apart), refused)


def _margin(plain: Answer, position: int) -> float:
    """Infinite where nothing is known: a text that ended early is no tie."""
    told = plain.choices[0].logprobs or ()
    values = sorted((value for _, value in told[position][1]), reverse=True) if position < len(told) else []
    return values[0] - values[1] if len(values) > 1 else float("inf")
