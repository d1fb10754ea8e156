"""What is logged of a failure that repeats, under a clock that the test moves."""

import logging

import pytest

from dflash2_ray.core.failure_log import FailureLog


class Clock:
    """`later` is asked to call when a window ends; `to` moves time there."""

    def __init__(self):
        self.now = 100.0
        self.calls = []

    def __call__(self):
        return self.now

    def later(self, delay_s, call):
        self.calls.append((self.now + delay_s, call))

    def to(self, now):
        self.now = now
        due, self.calls = [c for c in self.calls if c[0] <= now], [c for c in self.calls if c[0] > now]
        for _, call in due:
            call()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def failure_log(clock, caplog):
    caplog.set_level(logging.INFO)
    return FailureLog(logging.getLogger("tests.failures"), clock=clock, later=clock.later)


def lines(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_first_is_told_at_once_and_the_others_are_counted(failure_log, clock, caplog):
    for number in range(38):
        failure_log.error("request %d failed", number)
        clock.to(clock.now + 1)
    assert lines(caplog) == [("ERROR", "request 0 failed")]
    clock.to(160.0)
    assert lines(caplog)[1:] == [("ERROR", "… and 37 more of the same in 60 s: request 0 failed")]
    failure_log.error("request %d failed", 99)
    assert lines(caplog)[2:] == [("ERROR", "request 99 failed")]
    assert clock.calls == []


def test_kinds_do_not_hide_each_other(failure_log, caplog):
    failure_log.warning("the drafter is lost: %s", "killed", kind="killed")
    failure_log.warning("the drafter is lost: %s", "hung", kind="hung")
    failure_log.warning("the drafter is lost: %s", "killed", kind="killed")
    assert lines(caplog) == [("WARNING", "the drafter is lost: killed"), ("WARNING", "the drafter is lost: hung")]


def test_one_that_does_not_repeat_leaves_nothing(failure_log, clock, caplog):
    failure_log.error("once")
    clock.to(161.0)
    failure_log.error("once")
    assert lines(caplog) == [("ERROR", "once")] * 2
    assert clock.calls == []


def test_a_traceback_comes_once_with_the_place_that_failed(failure_log, caplog):
    for _ in range(2):
        try:
            raise ValueError("broken")
        except ValueError:
            failure_log.exception("a step failed", request_id="r1")
    (record,) = caplog.records
    assert record.exc_info[0] is ValueError
    assert (record.filename, record.request_id) == ("test_failure_log.py", "r1")


def test_texts_that_never_repeat_cannot_flood(failure_log, clock, caplog):
    for number in range(1000):
        failure_log.error("failed", kind=str(number))
    assert len(caplog.records) == 65
    clock.to(160.0)
    assert lines(caplog)[65:] == [("ERROR", "… and 935 more of the same in 60 s: failed")]
