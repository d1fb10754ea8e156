"""Time tables: monotone, interpolated, deaf to outliers, and following what slows every size alike."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_ray.core.step_times import StepTimes, bucket_of


def test_nothing_is_known_at_first():
    times = StepTimes()
    assert times.lookup(1, 8) is None
    assert not times.measured
    assert times.longest_within(1, 1.0, 100) == 0


def test_linear_between_sizes_flat_below_and_on_along_the_slope_above():
    times = StepTimes()
    for rows in (8, 16, 32):
        times.observe(1, rows, 0.010 + 0.001 * rows)
    assert times.lookup(1, 12) == pytest.approx(0.022)
    assert times.lookup(1, 2) == pytest.approx(0.018)
    assert times.lookup(1, 64) == pytest.approx(0.074)
    assert times.longest_within(1, 0.0301, 64) == 20


def test_requests_cost_besides_their_rows():
    times = StepTimes()
    for requests in (1, 4, 8):
        for rows in (8, 16, 32):
            times.observe(requests, rows, 0.010 + 0.001 * rows + 0.002 * requests)
    assert times.lookup(2, 16) == pytest.approx(0.030)
    assert times.per_request_s == pytest.approx(0.002)


def test_the_first_pass_of_a_size_may_compile():
    times = StepTimes()
    for seconds in (5.0, 0.01):
        times.observe(1, 8, seconds)
    assert times.lookup(1, 8) == pytest.approx(0.01)
    times.observe(1, 8, 0.011)
    assert times.lookup(1, 8) == pytest.approx(0.01)  # noise only ever adds


def test_outliers_hardly_count_and_a_slower_machine_does_everywhere():
    times = StepTimes()
    chance = random.Random(1)
    for _ in range(50):
        for rows in (4, 8, 16):
            times.observe(1, rows, 0.001 * rows * (20 if chance.random() < 0.05 else 1))
    assert times.lookup(1, 8) == pytest.approx(0.008, rel=0.15)
    before = times.lookup(1, 16)
    for _ in range(60):
        times.observe(1, 8, 0.016)
    assert times.lookup(1, 8) == pytest.approx(0.016, rel=0.1)
    assert times.lookup(1, 16) > 1.3 * before  # never seen slower, but believed


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_more_rows_never_take_less_time(observations):
    times = StepTimes()
    for requests, rows, seconds in observations:
        times.observe(requests, rows, seconds)
    for requests in (1, 7, 40):
        found = [times.lookup(requests, rows) for rows in range(1, 400, 3)]
        assert all(one >= 0 for one in found)
        assert found == sorted(found)


@given(st.integers(1, 100_000))
def test_buckets_are_narrow(rows):
    assert bucket_of(rows) <= rows < bucket_of(rows) * 1.13 + 1
