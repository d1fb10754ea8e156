"""Who is let in, and what the others are told."""

import pytest

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
