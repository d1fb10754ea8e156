"""The sampling law: unseeded draws with speculation against plain ones, by chi-square.

Per prompt the two samples are compared in the token at each position that drafts can reach, and in all of these tokens together.
The statistics of one position add up over the prompts, whose draws are independent. p-values are corrected for the number of
tests of all laws (Bonferroni), so `ALPHA` bounds the probability that any right law fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from dflash2_ray.verification.answer import Answer, Prompt
from dflash2_ray.verification.backend import Backend
from dflash2_ray.verification.homogeneity import Homogeneity, homogeneity

ALPHA = 1e-3
NUM_TOKENS = 6  # the first comes from the prompt alone, in every mode
LAWS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    "cut and shaped": {
        "temperature": 1.2,
        "top_p": 0.98,
        "top_k": 200,
        "min_p": 0.005,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}


@dataclass(frozen=True)
class LawTest:
    """One law. tests: by what is compared; num_samples: draws per prompt and side."""

    name: str
    options: dict[str, Any]
    tests: dict[str, Homogeneity]
    num_prompts: int
    num_samples: int
    num_accepted: int
    refused: str | None = None

    @property
    def run(self) -> dict[str, Homogeneity]:
        """The tests in which something varied."""
        return {name: test for name, test in self.tests.items() if test.degrees}

    @property
    def num_corrected(self) -> int:
        """How many tests p-values are corrected for: as many of each law."""
        return max(1, len(self.run)) * len(LAWS)

    @property
    def alpha(self) -> float:
        """Bound of one p-value."""
        return ALPHA / self.num_corrected

    @property
    def p_value(self) -> float:
        """The smallest one, corrected for the number of tests."""
        return min((min(1.0, test.p_value * self.num_corrected) for test in self.run.values()), default=1.0)

    @property
    def passed(self) -> bool:
        """False also when nothing was proven: no draft accepted, or nothing varied."""
        return self.refused is None and self.num_accepted > 0 and bool(self.run) and self.p_value >= ALPHA

    def as_dict(self) -> dict[str, Any]:
        return {
            "law": self.name,
            "options": self.options,
            "passed": self.passed,
            "refused": self.refused,
            "num_prompts": self.num_prompts,
            "num_samples_per_prompt_and_side": self.num_samples,
            "num_accepted_draft_tokens": self.num_accepted,
            "alpha": ALPHA,
            "num_tests": len(self.run),
            "num_tests_corrected_for": self.num_corrected,
            "smallest_p": min((one.p_value for one in self.run.values()), default=1.0),
            "corrected_p": self.p_value,
            "tests": [
                {
                    "compared": name,
                    "statistic": one.statistic,
                    "degrees_of_freedom": one.degrees,
                    "p": one.p_value,
                    "num_prompts": one.num_pairs,
                    "shift_found_with_power_0.9": one.detectable(self.alpha),
                    "power_against_shift_0.1": one.power(0.1, self.alpha),
                }
                for name, one in self.run.items()
            ],
        }


def check_law(
    backend: Backend,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    in_flight: int,
    told: Callable[[str], None] = lambda name: None,
) -> list[LawTest]:
    """Every law; told: called with a name before each of the two samples of a prompt is drawn. Raises ConfigError."""
    return [_check(backend, prompts, name, options, samples, in_flight, told) for name, options in LAWS.items()]


def num_draws(num_prompts: int) -> int:
    """How often `told` is called."""
    return len(LAWS) * num_prompts * 2


def _check(
    backend: Backend,
    prompts: Sequence[Prompt],
    name: str,
    options: dict[str, Any],
    samples: int,
    in_flight: int,
    told: Callable[[str], None],
) -> LawTest:
    asked = {**options, "max_tokens": NUM_TOKENS + 1, "ignore_eos": True}
    pairs: list[tuple[list[Answer], list[Answer]]] = []
    for index, prompt in enumerate(prompts):
        sides = []
        for speculate in (False, True):
            told(f"law: {name}, prompt {index + 1} of {len(prompts)}, {'speculative' if speculate else 'plain'}")
            sides.append(backend.answer([prompt] * samples, asked, speculate=speculate, in_flight=in_flight))
        pairs.append((sides[0], sides[1]))
    answers = [answer for sides in pairs for side in sides for answer in side]
    refused = next((f"{one.refused}: {one.message}" for one in answers if one.refused), None)
    accepted = sum(answer.accepted for _, side in pairs for answer in side)
    tests = {} if refused else _tests([(_tokens(plain), _tokens(fast)) for plain, fast in pairs])
    return LawTest(name, asked, tests, len(prompts), samples, accepted, refused)


def _tests(pairs: Sequence[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]) -> dict[str, Homogeneity]:
    """pairs: the texts of one prompt, plain and speculative."""

    def over_prompts(cut: slice) -> Homogeneity:
        each = (homogeneity([text[cut] for text in plain], [text[cut] for text in fast]) for plain, fast in pairs)
        return reduce(lambda one, other: one + other, each, Homogeneity())

    tests = {f"token {at + 1}": over_prompts(slice(at, at + 1)) for at in range(1, NUM_TOKENS)}
    return {**tests, f"tokens 2 to {NUM_TOKENS}": over_prompts(slice(1, NUM_TOKENS))}


def _tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.choices[0].token_ids for answer in answers]
