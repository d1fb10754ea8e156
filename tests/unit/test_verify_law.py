"""The statistic of `dflash2-ray verify`: right laws pass, wrong ones are found, and it finds what it says it finds."""

import math

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from dflash2_ray.verification.answer import Answer, Choice, Prompt
from dflash2_ray.verification.homogeneity import MIN_CELL, Homogeneity, homogeneity
from dflash2_ray.verification.law import ALPHA, NUM_TOKENS, check_law

RNG = np.random.default_rng
SPIKY = np.array([0.4, 0.25, *([0.05] * 4), *([0.0015] * 100)])


def draw(law, size, seed):
    return RNG(seed).choice(len(law), size, p=law / law.sum()).tolist()


def shifted(law, shift):
    """The law with `shift` of total variation between its first two tokens."""
    other = law / law.sum()
    other[0] -= shift
    other[1] += shift
    return other


def test_the_statistic_is_that_of_scipy():
    one, other = draw(np.array([0.5, 0.3, 0.2]), 400, 1), draw(np.array([0.5, 0.3, 0.2]), 400, 2)
    found = homogeneity(one, other)
    wanted = chi2_contingency(
        [[sample.count(value) for value in range(3)] for sample in (one, other)], correction=False
    )
    assert found.statistic == pytest.approx(wanted.statistic)
    assert (found.degrees, found.p_value) == (wanted.dof, pytest.approx(wanted.pvalue))


def test_p_values_of_a_right_law_are_uniform_also_with_many_rare_tokens():
    found = [homogeneity(draw(SPIKY, 300, 2 * index), draw(SPIKY, 300, 2 * index + 1)).p_value for index in range(2000)]
    for level in (0.1, 0.01):
        assert abs(np.mean(np.array(found) < level) - level) < 4 * math.sqrt(level * (1 - level) / len(found))


def test_power_is_what_is_found():
    alpha = 0.001
    one = homogeneity(draw(SPIKY, 400, 1), draw(SPIKY, 400, 2))
    shift = one.detectable(alpha)
    assert one.power(shift, alpha) == pytest.approx(0.9, abs=1e-3)
    assert one.power(shift / 2, alpha) < 0.5 < one.power(2 * shift, alpha) + 1e-9
    assert (one + one).detectable(alpha) < shift
    found = [
        homogeneity(draw(SPIKY, 400, index), draw(shifted(SPIKY, shift), 400, 10**6 + index)).p_value < alpha
        for index in range(200)
    ]
    assert np.mean(found) > 0.9 - 4 * math.sqrt(0.09 / 200)


def test_rare_values_share_cells_and_what_never_varies_is_no_test():
    assert homogeneity([7] * 50, [7] * 50).degrees == 0
    assert homogeneity([7] * 50, [*([7] * 49), 8]).degrees == 0, "one rare value has no cell of its own"
    assert homogeneity(list(range(MIN_CELL)), list(range(MIN_CELL))).degrees <= 8
    assert (Homogeneity() + Homogeneity()).p_value == 1.0
    assert Homogeneity().detectable(0.01) == math.inf
    with pytest.raises(ValueError, match="equal size"):
        homogeneity([1], [1, 2])


def test_a_difference_among_rare_values_alone_is_found():
    common, each = [0] * 305, MIN_CELL - 1
    one, other = [[*common, *(first + n % 5 for n in range(5 * each))] for first in (1, 6)]
    found = homogeneity(one, other)
    assert found.degrees > 1
    assert found.p_value < 1e-6


class Scripted:
    """Draws from a law per side; the tokens of an answer are independent."""

    def __init__(self, plain, fast, accepted=1, refused=None):
        self.laws, self.accepted, self.refused, self.calls = {False: plain, True: fast}, accepted, refused, 0

    def answer(self, prompts, options, *, speculate, in_flight):
        self.calls += 1
        assert options["max_tokens"] > NUM_TOKENS
        assert "seed" not in options
        if self.refused:
            return [Answer(refused=self.refused) for _ in prompts]
        tokens = np.array(draw(self.laws[speculate], len(prompts) * options["max_tokens"], self.calls)).reshape(
            len(prompts), -1
        )
        return [
            Answer((Choice("", tuple(map(int, row)), "length"),), {}, self.accepted if speculate else 0)
            for row in tokens
        ]


PROMPTS = [Prompt(False, "a"), Prompt(False, "b")]


def test_a_right_law_passes_and_a_wrong_one_fails():
    for law in check_law(Scripted(SPIKY, SPIKY), PROMPTS, samples=300, in_flight=1):
        assert law.passed
        assert len(law.run) == NUM_TOKENS
        told = law.as_dict()
        assert told["corrected_p"] >= ALPHA
        assert all(0 < one["shift_found_with_power_0.9"] < 0.5 for one in told["tests"])
    for law in check_law(Scripted(SPIKY, shifted(SPIKY, 0.2)), PROMPTS, samples=300, in_flight=1):
        assert not law.passed
        assert law.p_value < ALPHA


def test_what_proves_nothing_fails():
    for backend in (
        Scripted(SPIKY, SPIKY, accepted=0),
        Scripted(np.array([1.0]), np.array([1.0])),
        Scripted(SPIKY, SPIKY, refused="400, top_k"),
    ):
        assert not any(law.passed for law in check_law(backend, PROMPTS, samples=60, in_flight=1))
