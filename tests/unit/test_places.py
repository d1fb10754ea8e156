"""Who is let in, and what the others are told."""

import pytest

from dflash2_ray.core.full_units import FullUnits
from dflash2_ray.core.places import Places
from dflash2_ray.errors import Overloaded


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def refused(places, num_tokens=1):
    with pytest.raises(Overloaded) as caught:
        places.enter(num_tokens)
    return caught.value


def test_requests_are_bounded(clock):
    places = Places(2, 1000, clock)
    first, second = places.enter(5), places.enter(5)
    assert "2 requests run or wait" in str(refused(places))
    first.leave()
    first.leave()
    assert places.num_requests == 1
    places.enter(5)
    second.leave()
    assert places.num_requests == 1


def test_waiting_prompt_tokens_are_bounded(clock):
    places = Places(100, 10, clock)
    huge = places.enter(5000)  # alone, it fits
    error = refused(places)
    assert "5000 prompt tokens wait" in str(error)
    assert "max_queued_tokens=10" in str(error)
    huge.started()
    huge.started()
    one = places.enter(6)
    places.enter(4)
    refused(places)
    one.leave()
    assert places.num_queued_tokens == 4
    places.enter(6)
    huge.leave()
    assert (places.num_requests, places.num_queued_tokens) == (2, 10)


def test_the_wait_follows_the_rate_of_leaving(clock):
    places = Places(1, 1000, clock)
    running = places.enter(1)
    assert refused(places).retry_after_s == 1.0  # nothing is known yet
    running.leave()
    for _ in range(10):
        place = places.enter(1)
        clock.now += 4.0
        place.leave()
    places.enter(1)
    clock.now += 4.0
    waits = [refused(places).retry_after_s for _ in range(3)]
    assert waits == pytest.approx([4.0, 8.0, 12.0], rel=0.1)  # each behind the one before
    for _ in range(100):
        assert refused(places).retry_after_s <= 60.0


def test_an_old_rate_is_forgotten(clock):
    places = Places(1, 1000, clock)
    places.enter(1).leave()
    places.enter(1)
    clock.now += 3600
    assert refused(places).retry_after_s == 1.0


def test_a_fast_service_does_not_ask_for_a_storm(clock):
    places = Places(1, 1000, clock)
    for _ in range(5):
        places.enter(1).leave()
    places.enter(1)
    assert refused(places).retry_after_s == 0.1


def test_a_full_unit_says_so_and_takes_it_back(clock):
    told = []
    places = Places(2, 1000, clock, lambda: told.append(places.notice()))
    first, second = places.enter(1), places.enter(1)
    assert "2 requests run or wait" in told[0]["message"]
    refused(places)
    second.leave()
    assert told[1:] == [None]
    first.leave()
    assert len(told) == 2  # nothing new
    places.limit(0, 1000)
    places.limit(1, 1000)
    assert [one is None for one in told[2:]] == [False, True]


def test_refusals_at_the_door_count_like_those_inside(clock):
    places = Places(1, 1000, clock)
    places.enter(1).leave()
    clock.now += 2.0
    places.enter(1)
    inside = refused(places).retry_after_s
    notice = places.notice()
    units = FullUnits()
    units.told("u", notice)
    assert [units.refuse(["u"])[1].retry_after_s for _ in range(2)] == pytest.approx([2 * inside, 3 * inside])
    places.refused_elsewhere(2)
    assert places.num_rejected["max_num_queued_reqs"] == 3
    assert refused(places).retry_after_s == pytest.approx(4 * inside)
    assert str(units.refuse(["u"])[1]) == notice["message"] == str(refused(places))


def notice(interval_s, num_refused=0):
    return {"message": "full", "interval_s": interval_s, "num_refused": num_refused}


def test_only_when_all_units_that_run_are_known_to_be_full():
    units = FullUnits()
    assert units.refuse(["a"]) is None  # nothing is known
    units.told("a", notice(1.0))
    assert units.refuse([]) is None  # Serve knows of none: it waits for one
    assert units.refuse(["a", "b"]) is None  # a new one
    units.told("b", notice(1.0))
    assert units.refuse(["a", "b"]) is not None
    units.told("a", None)
    assert units.refuse(["a", "b"]) is None
    assert units.refuse(["b"]) is not None
    units.forget("b")
    assert units.refuse(["b"]) is None


def test_the_unit_with_the_shortest_wait_refuses():
    units = FullUnits()
    units.told("slow", notice(4.0))
    units.told("fast", notice(1.0))
    refusals = [units.refuse(["slow", "fast"]) for _ in range(8)]
    assert [unit for unit, _ in refusals].count("slow") == 1
    assert max(error.retry_after_s for _, error in refusals) <= 7.0
