"""Every set of options: speculation on = off, greedy and seeded, and a stream = the whole answer.

In float32 every difference fails. In other types the same prompt's logits differ by rounding errors in batches of another shape,
and a near-tie of the shaped law can fall the other way, with or without speculation. So there, once a token differs, plain
decoding alone is compared with plain decoding in company, over all sets, and a set fails when it holds more texts that differ
than that explains (Fisher's exact test). Anything but a token (text, finish, usage, log-probabilities, form) fails in every type.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy.stats import fisher_exact

from dflash2_ray.verification.answer import Answer, Prompt
from dflash2_ray.verification.backend import Backend
from dflash2_ray.verification.comparison import Difference, compare
from dflash2_ray.verification.law import ALPHA
from dflash2_ray.verification.option_sets import GREEDY, OptionSet, Seen, option_sets

Told = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A difference and where: how the text was made, index of the prompt, and what was compared with plain decoding."""

    text: str
    prompt: int
    run: str
    difference: Difference

    def as_dict(self) -> dict[str, Any]:
        return {"text": self.text, "prompt": self.prompt, "run": self.run, **self.difference.as_dict()}

    def __str__(self) -> str:
        return f"{self.text} prompt {self.prompt}, {self.run}: {self.difference}"


@dataclass(frozen=True)
class SetResult:
    """One set. num_texts: texts compared; rounding: texts whose tokens differ, where that may be rounding; p_rounding: the probability
    of so many if plain decoding in company differs as often; refused: why all was refused."""

    name: str
    options: dict[str, Any]
    num_texts: int
    num_accepted: int
    had_effect: bool | None
    differences: tuple[Found, ...]
    rounding: tuple[Found, ...] = ()
    p_rounding: float = 1.0
    alpha: float = ALPHA
    refused: str | None = None

    @property
    def passed(self) -> bool:
        return not self.differences and self.p_rounding >= self.alpha

    @property
    def notes(self) -> list[str]:
        """What a reader should know besides."""
        notes = []
        if self.refused is None and self.num_accepted == 0:
            notes.append("no draft accepted")
        if self.had_effect is False and self.refused is None:
            notes.append("no effect on these prompts")
        if self.rounding:
            notes.append(f"{len(self.rounding)} texts differ in a token (p {self.p_rounding:.2g} for rounding)")
        return notes

    def as_dict(self) -> dict[str, Any]:
        return {
            "set": self.name,
            "options": self.options,
            "passed": self.passed,
            "refused": self.refused,
            "num_texts": self.num_texts,
            "num_accepted_draft_tokens": self.num_accepted,
            "had_effect": self.had_effect,
            "p_rounding": self.p_rounding,
            "differences": [one.as_dict() for one in self.differences],
            "rounding": [one.as_dict() for one in self.rounding],
        }


@dataclass(frozen=True)
class OptionReport:
    """All sets. plain_differences: of `plain_texts` texts, how many differ between plain decoding alone and in company; 0 of 0 where
    nobody had to look."""

    sets: tuple[SetResult, ...]
    plain_texts: int = 0
    plain_differences: int = 0

    @property
    def num_accepted(self) -> int:
        return sum(one.num_accepted for one in self.sets)

    @property
    def passed(self) -> bool:
        """False also when no draft was accepted in any set: nothing was proven."""
        return self.num_accepted > 0 and all(one.passed for one in self.sets)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "num_accepted_draft_tokens": self.num_accepted,
            "plain_texts": self.plain_texts,
            "plain_differences": self.plain_differences,
            "sets": [one.as_dict() for one in self.sets],
        }


class OptionCheck:
    """exact: every difference fails; tolerance: of log-probabilities."""

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        in_flight: int,
        exact: bool,
        tolerance: float,
        told: Told = lambda name: None,
    ) -> None:
        self._backend, self._prompts, self._max_tokens, self._in_flight = backend, prompts, max_tokens, in_flight
        self._exact, self._tolerance, self._told = exact, tolerance, told
        self._plain: dict[tuple[str, str, str | None], list[Answer]] = {}

    def sets(self) -> tuple[OptionSet, ...]:
        """The sets, with values from plain greedy answers. Raises ConfigError."""
        answers = self._backend.answer(
            self._prompts, {**GREEDY, "max_tokens": self._max_tokens}, speculate=False, in_flight=self._in_flight
        )
        return option_sets(Seen.of(answers, self._backend.facts.eos_token_ids), self._max_tokens)

    def run(self, sets: Sequence[OptionSet]) -> OptionReport:
        """`told` is called with the name of each set before it is asked. Raises ConfigError."""
        by_name = {one.name: one for one in sets}
        results = []
        for one in sets:
            self._told(f"options: {one.name}")
            results.append(self._set(one, by_name))
        if self._exact or not any(one.rounding for one in results):
            return OptionReport(tuple(results))
        texts = differences = 0
        for one in sets:
            self._told(f"options: {one.name}, plain alone")
            for text in one.texts:
                company = self._asked_plain(one, text, one.route)
                alone = self._ask(one, text, one.route, speculate=False, in_flight=1)
                texts += len(alone)
                differences += sum(_token_differs(a, b, self._tolerance) for a, b in zip(company, alone, strict=True))
        judged = (
            replace(one, p_rounding=_p_rounding(one, texts, differences), alpha=ALPHA / len(sets)) for one in results
        )
        return OptionReport(tuple(judged), texts, differences)

    def _set(self, one: OptionSet, by_name: Mapping[str, OptionSet]) -> SetResult:
        differences: list[Found] = []
        rounding: list[Found] = []
        accepted = texts = 0
        effect = False
        refusals = []
        for text in one.texts:
            plain = self._asked_plain(one, text, one.route)
            runs = {
                "speculative": self._ask(one, text, one.route, speculate=True, in_flight=self._in_flight),
                "streamed": self._ask(one, text, one.route, speculate=True, in_flight=self._in_flight, stream=True),
            }
            accepted += sum(answer.accepted for answer in runs["speculative"])
            texts += sum(len(answer.choices) for answer in plain)
            refusals += [f"{answer.refused}: {answer.message}" for answer in plain if answer.refused]
            for prompt, answer in enumerate(plain):
                for run, answers in runs.items():
                    found = _first(one, answer, answers[prompt], self._tolerance)
                    if found is not None:
                        may_be_rounding = not self._exact and found.what == "token"
                        (rounding if may_be_rounding else differences).append(Found(text, prompt, run, found))
                        break
            if one.beside is not None and text in by_name[one.beside].texts:
                beside = self._asked_plain(by_name[one.beside], text, one.route)
                effect |= any(compare(a, b, self._tolerance) is not None for a, b in zip(beside, plain, strict=True))
        refused = refusals[0] if refusals and not texts else None
        return SetResult(
            one.name,
            one.options,
            texts,
            accepted,
            effect if one.beside is not None else None,
            tuple(differences),
            tuple(rounding),
            refused=refused,
        )

    def _asked_plain(self, one: OptionSet, text: str, route: str | None) -> list[Answer]:
        key = (one.name, text, route)
        if key not in self._plain:
            self._plain[key] = self._ask(one, text, route, speculate=False, in_flight=self._in_flight)
        return self._plain[key]

    def _ask(
        self, one: OptionSet, text: str, route: str | None, *, speculate: bool, in_flight: int, stream: bool = False
    ) -> list[Answer]:
        options = {"max_tokens": self._max_tokens, **one.texts[text]}
        prompts = [replace(prompt, chat=route == "chat") if route else prompt for prompt in self._prompts]
        return self._backend.answer(prompts, options, speculate=speculate, in_flight=in_flight, stream=stream)


def _first(one: OptionSet, plain: Answer, got: Answer, tolerance: float) -> Difference | None:
    """Against plain decoding, then against the form that was asked for."""
    found = compare(plain, got, tolerance)
    if found is None and one.form is not None:
        for index, choice in enumerate(got.choices):
            if choice.finish_reason != "length" and not one.form(choice):
                return Difference("form", one.name, choice.text or choice.tool_calls, choice=index)
    return found


def _token_differs(one: Answer, other: Answer, tolerance: float) -> bool:
    found = compare(one, other, tolerance)
    return found is not None and found.what == "token"


def _p_rounding(one: SetResult, plain_texts: int, plain_differences: int) -> float:
    """Of at least so many texts of this set, if they differ no more often than plain ones of all sets."""
    if not one.rounding:
        return 1.0
    count = max(one.num_texts, len(one.rounding))
    rows = [[len(one.rounding), count - len(one.rounding)], [plain_differences, plain_texts - plain_differences]]
    return float(fisher_exact(rows, alternative="greater").pvalue)
