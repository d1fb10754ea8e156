"""When a unit tells its ranks of the drafter again, and when it has it replaced."""

from dflash2_ray.core.drafter_watch import APART_S, DrafterWatch

HERE = "drafter:1"


def state(connected, connection=1, suspect=None):
    return {"connected": connected, "connection": connection, "suspect": suspect}


def test_every_break_is_told_once_and_mended():
    """Also the second break with the same living drafter."""
    watch = DrafterWatch()
    for connection in (1, 2, 3):
        assert watch.look(0.0, 0, HERE, state(True, connection)) is None
        assert watch.look(1.0, 0, HERE, state(False, connection, "lost")) == "tell"
        assert watch.look(1.5, 0, HERE, state(False, connection, "lost")) is None


def test_ranks_that_stay_apart_have_the_drafter_replaced_once():
    watch = DrafterWatch()
    assert watch.look(0.0, 0, HERE, state(False)) == "tell"
    assert watch.look(APART_S, 0, HERE, state(False)) is None
    assert watch.look(APART_S + 0.1, 0, HERE, state(False)) == "apart"
    assert watch.look(APART_S + 0.2, 0, HERE, state(False)) is None
    assert watch.look(APART_S + 0.3, 0, "drafter:2", state(False)) == "tell"


def test_a_new_generation_of_ranks_is_told_again():
    watch = DrafterWatch()
    assert watch.look(0.0, 0, HERE, state(False, 0)) == "tell"
    assert watch.look(1.0, 1, HERE, state(False, 0)) == "tell"


def test_a_hung_drafter_is_replaced_once_per_connection():
    watch = DrafterWatch()
    assert watch.look(0.0, 0, HERE, state(True, 1, "hung")) == "hung"
    assert watch.look(0.5, 0, None, state(True, 1, "hung")) is None
    assert watch.look(1.0, 0, "drafter:2", state(True, 1, "hung")) is None  # an old pulse
    assert watch.look(1.5, 0, "drafter:2", state(True, 2, "hung")) == "hung"


def test_nothing_is_said_of_ranks_that_say_nothing():
    watch = DrafterWatch()
    assert watch.look(0.0, 0, HERE, None) is None
    assert watch.look(0.0, 0, HERE, {}) is None
    assert watch.look(0.0, 0, None, state(False)) is None
