"""Noise with one value per token id: the written formula on every path, uniform, independent across ids, positions, seeds
and purposes; the race finds the same winner as one logarithm per token does, and draws from p."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dflash2_ray.sampling import token_noise
from dflash2_ray.sampling.noise import TOKEN_STREAM, Purpose, all_uniforms, words
from dflash2_ray.sampling.token_noise import exponentials, race

MASK = 2**64 - 1


def formula(seed, position, token_id):
    """E in Python integers, as the module's docstring writes it."""
    w = [int(word) for word in words([seed], [position], TOKEN_STREAM)[:, 0]]
    a, b = w[0] << 32 | w[1], w[2] << 32 | w[3]
    z = (a + token_id * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27 ^ b) * 0x94D049BB133111EB & MASK
    k = (z ^ z >> 31) >> 1 | 1
    return -math.log1p(-min(k * 2.0**-63, 1 - 2.0**-53))


def row(seed, position, num_ids):
    return exponentials([seed], [position], torch.arange(num_ids)[None])[0]


def brute(probs, seeds, positions):
    ids = torch.arange(probs.shape[1]).expand(probs.shape)
    return (probs.double() / exponentials(seeds, positions, ids)).argmax(-1).tolist()


# ---- one function on every path ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**63, MASK, -1])
@pytest.mark.parametrize("position", [0, 5, 2**32 + 1])
def test_the_formula(seed, position):
    ids = [0, 1, 2, 100, 151_935, 2**31]
    values = exponentials([seed], [position], torch.tensor([ids]))[0].tolist()
    for value, token_id in zip(values, ids, strict=True):
        assert value == pytest.approx(formula(seed, position, token_id), rel=1e-14)


def test_an_id_alone_gets_the_bits_of_its_row():
    generator = torch.Generator().manual_seed(0)
    full = row(7, 30, 50_000)
    for size in (1, 2, 3, 7, 16, 33, 1000):
        ids = torch.randint(50_000, (3, size), generator=generator)
        own = exponentials([9, 7, 7], [30, 30, 31], ids)
        assert own.dtype == torch.float64
        assert torch.equal(own[1], full[ids[1]])
        assert not torch.equal(own[0], full[ids[0]])
        assert not torch.equal(own[2], full[ids[2]])


def test_the_path_of_other_devices_agrees():
    a, b = token_noise._keys(range(40), range(100, 140))
    ids = torch.arange(3000)
    keys = [token_noise._signed(key, torch.device("cpu"))[:, None] for key in (a, b)]
    other = token_noise._exponentials_torch(*keys, ids)
    torch.testing.assert_close(other, exponentials(range(40), range(100, 140), ids.expand(40, -1)), rtol=1e-14, atol=0)


def test_values_are_positive_and_finite_and_resolve_the_rare_ones():
    sample = row(3, 1, 1_000_000)
    assert float(sample.min()) > 0
    assert float(sample.max()) < 44
    assert len(sample.unique()) == len(sample)
    for limit in (1e-5, 1e-4, 1e-3):  # the small ones decide a race
        expected = -math.expm1(-limit) * len(sample)
        assert abs(int((sample < limit).sum()) - expected) < 5 * expected**0.5


# ---- uniform and independent ------------------------------------------------------------------------------------------

DRAWS = 32_768
CELLS = 16


def unit(values):
    """Uniform in (0, 1)."""
    return -torch.expm1(-values.flatten())


def statistic(first, second=None):
    cells = CELLS if second is None else CELLS**2
    index = (first * CELLS).long().clamp_max(CELLS - 1)
    if second is not None:
        index = index * CELLS + (second * CELLS).long().clamp_max(CELLS - 1)
    counts = torch.bincount(index, minlength=cells).double()
    return float(((counts - len(index) / cells) ** 2 / (len(index) / cells)).sum()), chi2.ppf(0.9999, cells - 1)


def independent(first, second):
    value, cut = statistic(first, second)
    assert value < cut
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / len(first) ** 0.5


def many(seeds, positions, ids):
    return unit(exponentials(seeds, positions, torch.as_tensor(ids)[:, None]))


FIXED = [5] * DRAWS
MOVING = range(DRAWS)


@pytest.mark.parametrize("moves", ["ids", "positions", "seeds"])
@pytest.mark.parametrize("low_digits", [False, True])
def test_uniform_along_ids_positions_and_seeds(moves, low_digits):
    sample = many(*(MOVING if moves == one else FIXED for one in ("seeds", "positions", "ids")))
    value, cut = statistic(sample * 4096 % 1 if low_digits else sample)
    assert value < cut


@pytest.mark.parametrize("moves", ["ids", "positions", "seeds"])
@pytest.mark.parametrize(
    "change",
    [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, -1), (1, -1, 0), (1, 0, -1), (0, 0, 4096), (2**32, 0, 0), (2**63, 0, 0)],
    ids=str,
)
def test_neighbours_are_independent(moves, change):
    seeds, positions, ids = (
        [2 * i + 1 for i in MOVING] if moves == one else FIXED for one in ("seeds", "positions", "ids")
    )
    by_seed, by_position, by_id = change
    independent(
        many(seeds, positions, ids),
        many([s + by_seed for s in seeds], [p + by_position for p in positions], [i + by_id for i in ids]),
    )


def test_many_rows_do_not_correlate():
    """64 rows of neighbouring positions and seeds: the largest of all correlations is that of independent rows."""
    rows = exponentials(
        [s for s in range(8) for _ in range(8)],
        [p for _ in range(8) for p in range(8)],
        torch.arange(20_000).expand(64, -1),
    )
    correlation = torch.corrcoef(rows) - torch.eye(64, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / 20_000**0.5


@pytest.mark.parametrize("purpose", Purpose)
def test_independent_of_the_other_purposes(purpose):
    independent(many(FIXED, MOVING, FIXED), all_uniforms(FIXED, MOVING)[purpose].double())
    independent(many(MOVING, FIXED, [0] * DRAWS), all_uniforms(MOVING, FIXED)[purpose].double())


def test_the_statistics_see_a_dependence():
    sample = many(FIXED, FIXED, MOVING)
    value, cut = statistic(sample, (sample * 3 + many(FIXED, FIXED, [i + 1 for i in MOVING])) % 1)
    assert value < cut, "multiplication by three hides it from the cells, so this one must pass"
    value, cut = statistic(sample, 0.2 * sample + 0.8 * many(FIXED, MOVING, FIXED))
    assert value > cut
    value, cut = statistic(sample * 0.98)
    assert value > cut


# ---- the race ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 2048, 16_383, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("kind", ["flat", "usual", "peaked", "sparse", "denormal"])
def test_the_race_finds_what_a_logarithm_per_token_finds(vocab, kind):
    generator = torch.Generator().manual_seed(vocab)
    rows = 3 if vocab > 10_000 else 40
    scale = {"flat": 0.0, "usual": 2.0, "peaked": 30.0, "sparse": 2.0, "denormal": 60.0}[kind]
    probs = torch.softmax(torch.randn(rows, vocab, generator=generator) * scale, -1)
    if kind == "sparse":
        probs[torch.rand(probs.shape, generator=generator) < 0.99] = 0.0
        probs[:, vocab // 2] = 1e-3
    seeds, positions = [3 * i for i in range(rows)], [100 + i % 5 for i in range(rows)]
    won = race(probs, seeds, positions)
    assert won == brute(probs, seeds, positions)
    assert all(float(probs[i, token]) > 0 for i, token in enumerate(won))
    order = list(reversed(range(rows)))
    assert race(probs[order].contiguous(), [seeds[i] for i in order], [positions[i] for i in order]) == won[::-1]
    for i in range(0, rows, 7):
        assert race(probs[i : i + 1], [seeds[i]], [positions[i]]) == [won[i]]


def test_nothing_that_could_win_is_dropped():
    """The bound of one token never exceeds its p / E, down to the smallest and up to the largest uniform."""
    exact = np.concatenate([np.logspace(-18.9, -1e-9, 4000), 1 - np.logspace(-16, -1, 4000)])
    exact = np.minimum(exact, 1 - 2.0**-53)
    for p in (1.0, 0.3, 1e-7, 1e-30):
        rounded = np.float32(p) / exact.astype(np.float32)
        for x, ratio in zip(exact, rounded, strict=True):
            assert token_noise._surely(p, float(ratio)) <= p / -math.log1p(-x)


def test_the_lowest_id_wins_exact_ties(monkeypatch):
    monkeypatch.setattr(token_noise, "_GAMMA", 0)  # every id gets the same noise
    monkeypatch.setattr(token_noise, "_steps", lambda n: np.zeros(n, dtype=np.uint64))
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.5, 0.0, 0.5, 0.0]])
    assert race(probs, [1, 2], [3, 4]) == [1, 0]


def test_a_row_that_is_not_a_number_ends_no_process():
    assert 0 <= race(torch.full((1, 5), float("nan")), [1], [2])[0] < 5


@pytest.mark.parametrize("moves", ["seeds", "positions"])
def test_the_race_draws_from_p(moves):
    p = torch.tensor([0.02, 0.08, 0.30, 0.0, 0.15, 0.25, 0.10, 0.10])
    draws = 40_000
    seeds, positions = ([9] * draws, range(draws)) if moves == "positions" else (range(draws), [9] * draws)
    won = torch.tensor(race(p.repeat(draws, 1), seeds, positions))
    counts = torch.bincount(won, minlength=8).double()
    assert counts[3] == 0
    expected = (p * draws).double()[p > 0]
    assert float(((counts[p > 0] - expected) ** 2 / expected).sum()) < chi2.ppf(0.999, 6)
    pairs = torch.bincount(won[:-1] * 8 + won[1:], minlength=64).double()  # neighbouring draws
    expected = (p[:, None] * p).flatten().double() * (draws - 1)
    cells = expected > 0
    assert float(((pairs[cells] - expected[cells]) ** 2 / expected[cells]).sum()) < chi2.ppf(0.9999, 48)


def test_no_two_keys_are_equal():
    grid = list(itertools.product(range(100), range(100)))
    a, b = token_noise._keys([s for s, _ in grid], [p for _, p in grid])
    assert len(set(a.tolist())) == len(set(b.tolist())) == len(grid)
    assert not set(a.tolist()) & set(b.tolist())
