"""Width and schedule from tables: both directions, hysteresis, what probes may cost, and nothing from the future."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_ray.core.acceptance import Acceptance, survival
from dflash2_ray.core.pipeline import balance, draft_time, holds
from dflash2_ray.core.planner import EarlierSteps, Load, choose, predict, shared_widths, width_grid
from dflash2_ray.core.step_control import PROBE_SHARE, StepControl
from dflash2_ray.core.step_times import StepTimes

MAX = 7


def table(seconds, sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)):
    times = StepTimes()
    for rows in sizes:
        times.observe(1, rows, seconds(rows))
    return times


def memory_bound(rows):
    return 0.010 + 1e-6 * rows


def compute_bound(rows):
    return 0.001 + 0.001 * rows


def earlier(verify, draft, a=0.8, **more):
    return EarlierSteps(table(verify), table(draft), tuple(a ** (j + 1) for j in range(MAX)), **more)


def best(known, num_requests, held=(MAX, "serial"), schedules=("serial", "split")):
    return choose(known, Load.of({MAX: num_requests}), width_grid(MAX), schedules, held)[0]


@pytest.mark.parametrize(
    ("most", "grid"), [(7, (0, 1, 3, 5, 7)), (15, (0, 1, 3, 5, 7, 11, 15)), (4, (0, 1, 3, 4)), (1, (0, 1)), (0, (0,))]
)
def test_the_largest_width_is_always_on_the_grid(most, grid):
    assert width_grid(most) == grid


def test_memory_bound_drafts_the_full_width_serially():
    known = earlier(memory_bound, lambda rows: 0.1 * memory_bound(rows), separate=True)
    for requests in (1, 4, 16):
        one = best(known, requests, held=(0, "serial"))
        assert (one.width, one.schedule) == (MAX, "serial")


def test_compute_bound_drafts_narrower_and_bad_drafts_not_at_all():
    def verify(rows):
        return 0.010 + 2e-4 * rows

    def draft(rows):
        return 0.3 * verify(rows)

    assert 0 < best(earlier(verify, draft, a=0.8), 16).width < MAX
    assert best(earlier(verify, draft, a=0.2), 16).width == 0
    assert (
        best(earlier(compute_bound, draft, a=0.97), 16).width == 0
    )  # every row costs as much as the token it may bring
    widths = [best(earlier(verify, draft, a=a), 16).width for a in (0.3, 0.5, 0.7, 0.9, 0.97)]
    assert widths == sorted(widths)
    assert widths[-1] == MAX


def test_split_when_the_draft_is_dear_and_halves_are_cheap():
    per_request = StepTimes()  # 2 ms a request (its keys are read once, whatever its rows), almost nothing a row
    for requests in (1, 2, 4, 8, 16):
        for rows in (16, 64, 128):
            per_request.observe(requests, rows, 0.001 + 1e-6 * rows + 0.002 * requests)
    drafts = table(lambda rows: 1e-4 * rows)
    survived = tuple(0.9 ** (j + 1) for j in range(MAX))
    assert best(EarlierSteps(per_request, drafts, survived, separate=True), 16).schedule == "split"
    assert best(EarlierSteps(per_request, drafts, survived, separate=True), 1).schedule == "serial"
    assert best(EarlierSteps(per_request, drafts, survived), 16).schedule == "serial"  # colocated: nothing overlaps
    assert best(earlier(memory_bound, lambda rows: 0.002, separate=True), 16).schedule == "serial"


def test_split_formula():
    known = earlier(compute_bound, lambda rows: 0.01, link_s=0.002, separate=True)
    load = Load.of({MAX: 8})
    assert predict(known, load, MAX, "split").step_s == pytest.approx(max(2 * 0.033, 2 * 0.01, 0.033 + 0.012))
    assert predict(known, load, MAX).step_s == pytest.approx(0.065 + 0.012)
    assert predict(known, load, 0).step_s == pytest.approx(0.009)
    mixed = Load.of({0: 3, 2: 1, MAX: 1})
    assert (mixed.num_requests, mixed.num_rows(5), mixed.num_draft_rows(5), mixed.num_drafted(5)) == (5, 12, 9, 2)
    assert predict(known, mixed, 5).tokens == pytest.approx(5 + 0.8 + 0.64 + sum(0.8**j for j in range(1, 6)))


def test_without_measurements_what_is_held_stays():
    known = EarlierSteps(StepTimes(), StepTimes(), (0.1,) * MAX)
    assert best(known, 16) is None
    control = StepControl(MAX, adapts_width=True, schedules=("serial", "split"), separate=True)
    for _ in range(100):
        decision = control.decide(Load.of({MAX: 16}))
        assert (decision.width, decision.schedule) == (MAX, "serial")
    assert control.num_switches == control.num_probes == 0


def test_small_gains_change_nothing():
    def verify(rows):  # width 5 gains 2 %
        return 1.0 if rows <= 12 else 1.0 * 1.02 * (sum(0.8**j for j in range(8)) / sum(0.8**j for j in range(6)))

    known = EarlierSteps(table(verify, (12, 16)), table(lambda rows: 1e-9), tuple(0.8 ** (j + 1) for j in range(MAX)))
    assert (
        predict(known, Load.of({MAX: 2}), 5).tokens_per_s > 1.015 * predict(known, Load.of({MAX: 2}), MAX).tokens_per_s
    )
    assert best(known, 2).width == MAX
    assert best(known, 2, held=(5, "serial")).width == 5


def adaptive(verify, draft, a, **more):
    control = StepControl(MAX, adapts_width=True, **more)
    control.verify_times, control.draft_times = table(verify), table(draft)
    chance = random.Random(7)
    for _ in range(600):
        survived = 0
        while survived < MAX and chance.random() < a:
            survived += 1
        control.decided(MAX, survived)
    return control


def test_a_change_of_load_is_decided_at_once_and_nothing_else_before_sixteen_steps():
    control = adaptive(compute_bound, lambda rows: 1e-5 * rows, 0.8)
    control.verify_times = table(lambda rows: 0.010 if rows <= 8 else 0.010 + 0.002 * (rows - 8))
    assert control.decide(Load.of({MAX: 1})).width == MAX
    wide = control.decide(Load.of({MAX: 32})).width
    assert wide < MAX
    assert control.decide(Load.of({MAX: 1})).width == MAX
    control.verify_times = table(lambda rows: 0.010 * rows)
    widths = [control.decide(Load.of({MAX: 1})).width for _ in range(20)]
    assert widths[:15] == [MAX] * 15
    assert widths[16] < MAX


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([memory_bound, compute_bound, lambda rows: 0.005 + 1e-4 * rows]),
    st.floats(0.01, 2.0),
    st.floats(0.0, 1.0),
    st.sampled_from([1, 2, 8, 32]),
)
def test_probes_cost_less_than_one_percent(verify, draft_share, a, requests):
    control = adaptive(verify, lambda rows: draft_share * verify(rows), a)
    load = Load.of({MAX: requests})
    spent = lost = 0.0
    for _ in range(3000):
        decision = control.decide(load)
        rate = predict(control.earlier_steps(), load, control.width).tokens_per_s
        one = predict(control.earlier_steps(), load, decision.width)
        spent += one.step_s
        if decision.is_probe:
            lost += max(0.0, one.step_s - one.tokens / rate)
    assert lost <= 1.01 * PROBE_SHARE * spent
    assert lost < 0.01 * spent


def test_speculation_comes_back_by_itself_when_drafts_get_better():
    control = adaptive(lambda rows: 0.005 + 2e-4 * rows, lambda rows: 0.001 + 5e-5 * rows, 0.05)
    load = Load.of({MAX: 16})
    control.decide(load)
    assert control.width == 0
    for _ in range(6000):
        decision = control.decide(load)
        for _ in range(16):
            if decision.width:
                control.decided(decision.width, decision.width)  # everything would be accepted now
    assert control.num_probes > 0
    assert control.width == MAX


def test_acceptance_knows_only_decided_slots():
    counts = Acceptance(4)
    for _ in range(400):
        counts.observe(4, 1)
    first, second, third, fourth = counts.by_slot()
    assert first > 0.98
    assert second < 0.02
    assert third < 0.02  # never reached: as the slot before it
    assert fourth < 0.02
    assert survival((0.5, 0.5)) == (0.5, 0.25)
    for _ in range(3000):
        counts.observe(4, 4)
    assert min(counts.by_slot()) > 0.9  # old counts fade


def test_narrow_groups_join_where_one_pass_is_cheaper():
    flat = table(lambda rows: 0.002 + 1e-6 * rows)
    assert shared_widths({7: 4, 3: 1, 1: 2}, flat.lookup) == {7: 7, 3: 7, 1: 7}
    steep = table(lambda rows: 1e-3 * rows)
    assert shared_widths({7: 4, 1: 8}, steep.lookup) == {7: 7, 1: 1}
    assert shared_widths({7: 4, 3: 1}, StepTimes().lookup) == {7: 7, 3: 3}


def test_hold_rule():
    flat, steep = table(memory_bound).lookup, table(compute_bound).lookup
    assert holds(0.005, (4, 32), (4, 32), flat)  # a second pass costs 10 ms
    assert not holds(0.015, (4, 32), (4, 32), flat)
    assert not holds(0.005, (4, 32), (4, 32), steep)
    assert not holds(0.0, (4, 32), (0, 0), flat)
    assert not holds(0.0, (4, 32), (4, 32), StepTimes().lookup)


@given(st.lists(st.integers(0, 12), unique=True), st.dictionaries(st.integers(0, 12).map(str), st.integers(0, 1)))
def test_halves_are_balanced(running, groups):
    names = [str(one) for one in running]
    result = balance(names, groups)
    assert sorted(result) == sorted(names)
    halves = [[one for one in names if result[one] == half] for half in (0, 1)]
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    assert balance(names, result) == result


def test_what_a_collect_tells():
    assert draft_time(1.0, 1.010, 1.020, None) == pytest.approx(0.020)  # waited: all of it
    assert draft_time(1.0, 1.030, 1.0300001, 0.020) is None  # came some time before
    assert draft_time(1.0, 1.015, 1.0150001, 0.020) == pytest.approx(0.0150001)  # at most that
