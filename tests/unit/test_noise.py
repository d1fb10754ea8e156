"""Noise: Philox4x32-10 gives its published answers on both paths, and draws of different seeds, positions and purposes
are uniform and independent."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dflash2_ray.sampling import noise
from dflash2_ray.sampling.noise import Purpose, all_uniforms, philox, uniforms, words

ONES = 0xFFFFFFFF
EDGES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
KNOWN = [  # counter, key, words: the known answers of the Random123 distribution
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def column(values):
    return np.array(values, dtype=np.uint64)[:, None]


def many(seed, position):
    """The words of one draw by the numpy path, whatever the number of draws asks for."""
    return words([seed] * (noise._FEW + 1), [position] * (noise._FEW + 1))[:, 0].tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox(column(counter), column(key))[:, 0].tolist() == expected


def test_the_seed_is_the_key_and_the_position_the_counter():
    expected = KNOWN[0][2]
    assert words([0], [0])[:, 0].tolist() == expected
    seed, position = 0x299F31D0A4093822, 0x85A308D3243F6A88
    expected = philox(column([0x243F6A88, 0x85A308D3, 0, 0]), column([0xA4093822, 0x299F31D0]))[:, 0].tolist()
    assert words([seed], [position])[:, 0].tolist() == expected
    assert many(seed, position) == expected


def test_both_paths_agree():
    generator = random.Random(0)
    cases = list(itertools.product(EDGES, EDGES))
    cases += [(generator.getrandbits(64), generator.getrandbits(generator.choice([8, 20, 40, 64]))) for _ in range(300)]
    together = words([s for s, _ in cases], [p for _, p in cases])
    assert together.dtype == np.uint64
    assert len(cases) > noise._FEW
    for start in range(0, len(cases), noise._FEW):
        part = cases[start : start + noise._FEW]
        few = words([s for s, _ in part], [p for _, p in part])
        assert np.array_equal(few, together[:, start : start + len(part)])
    assert (together < 2**32).all()


@pytest.mark.parametrize("size", [0, 1, 23, 24, 25, 60])
def test_a_draw_does_not_depend_on_the_others_of_its_call(size):
    seeds, positions = [7 * i - 90 for i in range(size)], list(range(1000, 1000 + size))
    together = all_uniforms(seeds, positions)
    assert together.shape == (4, size)
    assert together.dtype == torch.float32
    for i in range(size):
        assert torch.equal(all_uniforms([seeds[i]], [positions[i]])[:, 0], together[:, i])
    for purpose in Purpose:
        assert torch.equal(uniforms(seeds, positions, purpose), together[purpose])


@pytest.mark.parametrize("seed", [-1, -(2**63), -12345, 2**63, 2**64, 2**64 + 5, 2**70 - 3, -(2**64) - 1])
def test_seeds_are_taken_modulo_two_to_the_64(seed):
    reduced = seed % 2**64
    assert words([seed], [17])[:, 0].tolist() == words([reduced], [17])[:, 0].tolist()
    assert many(seed, 17) == many(reduced, 17) == words([seed], [17])[:, 0].tolist()


def test_lengths_must_agree():
    with pytest.raises(ValueError):  # noqa: PT011
        words([1, 2], [1])


def test_uniforms_lie_in_the_half_open_interval_for_extreme_words():
    unit = noise._unit(np.array([0, 255, 256, ONES], dtype=np.uint64))
    assert unit.dtype == np.float32
    assert unit.tolist() == [0.0, 0.0, 2.0**-24, 1.0 - 2.0**-24]
    sample = all_uniforms([3] * 50_000, range(50_000))
    assert float(sample.min()) >= 0
    assert float(sample.max()) < 1


DRAWS = 60_000
CELLS = 16


def cell(values):
    return (values.double() * CELLS).long()


def statistic(first, second=None):
    """Chi-square of one uniform sample, or of the joint cells of two: about 1 per cell when they are independent."""
    index = cell(first) if second is None else cell(first) * CELLS + cell(second)
    cells = CELLS if second is None else CELLS**2
    counts = torch.bincount(index, minlength=cells).double()
    return float(((counts - len(index) / cells) ** 2 / (len(index) / cells)).sum()), chi2.ppf(0.9999, cells - 1)


@pytest.mark.parametrize("seeds", ["one seed, many positions", "many seeds, one position"])
def test_every_purpose_is_uniform_and_independent_of_the_others(seeds):
    one_seed = seeds.startswith("one")
    sample = all_uniforms([5] * DRAWS, range(DRAWS)) if one_seed else all_uniforms(range(DRAWS), [5] * DRAWS)
    for purpose in Purpose:
        value, cut = statistic(sample[purpose])
        assert value < cut
    for first, second in itertools.combinations(Purpose, 2):
        value, cut = statistic(sample[first], sample[second])
        assert value < cut, (first, second)
        assert abs(float(torch.corrcoef(sample[[first, second]].double())[0, 1])) < 4 / DRAWS**0.5


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("change", [(0, 1), (1, 0), (1, -1), (2**32, 0)], ids=str)
def test_neighbouring_seeds_and_positions_are_independent(purpose, change):
    by_seed, by_position = change
    seeds, positions = [seed * 3 for seed in range(DRAWS // 2)], [9 + 2 * i for i in range(DRAWS // 2)]
    first = uniforms(seeds, positions, purpose)
    second = uniforms([s + by_seed for s in seeds], [p + by_position for p in positions], purpose)
    value, cut = statistic(first, second)
    assert value < cut


def test_the_statistic_sees_a_dependence():
    sample = all_uniforms([5] * DRAWS, range(DRAWS))
    value, cut = statistic(sample[0], (sample[0] * 0.2 + sample[1] * 0.8))
    assert value > cut
    value, cut = statistic(sample[0] * 0.98)
    assert value > cut


def test_no_two_streams_share_a_word():
    grid = list(itertools.product(range(100), range(100)))
    drawn = words([s for s, _ in grid], [p for _, p in grid])
    pairs = (drawn[0] << np.uint64(32) | drawn[1]).tolist()
    assert len(set(pairs)) == len(grid)
