"""A draft width that changes from step to step: the same text, contexts without gaps, and choices that see earlier steps only."""

import itertools

import pytest

from dflash2_ray.core.planner import Load
from dflash2_ray.core.step_times import StepTimes
from dflash2_ray.runtime.pipelined_loop import PipelinedLoop
from dflash2_ray.runtime.target_loop import TargetLoop
from dflash2_ray.runtime.warm_up import measure, warm_up

LOOPS = {
    "serial": {"loop_class": TargetLoop},
    "ahead": {"loop_class": PipelinedLoop, "pipeline": "auto", "drafter_placement": "separate"},
    "split": {"loop_class": PipelinedLoop, "pipeline": "split", "drafter_placement": "separate"},
}


@pytest.fixture(params=LOOPS)
def make(scripted, request):
    """Builds a loop with an adaptive width, in every kind."""
    return lambda drafter, **settings: scripted.make_loop(
        drafter, **{"draft_width": "auto", **LOOPS[request.param], **settings}
    )


class Alternating:
    """Forces the widths of a list, one per decision."""

    def __init__(self, loop, widths):
        self.widths = itertools.cycle(widths)
        decide = loop.control.decide

        def forced(load):
            loop.control.force(next(self.widths))
            return decide(load)

        loop.control.decide = forced


@pytest.mark.parametrize("pattern", ["ALL", "NONE", "P1", "MIX"])
@pytest.mark.parametrize("widths", [[3, 0, 0, 1, 3], [0, 3, 3], [1, 2, 3, 0, 0, 0]])
def test_any_sequence_of_widths_gives_the_same_text(scripted, make, pattern, widths):
    drafter = scripted.Drafter(scripted.PATTERNS[pattern])
    loop = make(drafter, max_num_seqs=4, num_kv_pages=30)
    Alternating(loop, widths)
    specs = [scripted.spec(f"r{i}", range(i + 1), max_tokens=20 + i) for i in range(8)]
    results = scripted.run(loop, specs)
    for i in range(8):
        tokens, last = results[f"r{i}"]
        assert tokens == scripted.continuation(range(i + 1), 20 + i)
        assert (last.stats["num_accepted_draft_tokens"] > 0) == (pattern != "NONE")
        assert last.stats["num_plain_steps"] > 0
        assert last.stats["skipped_reason"] is None
    assert drafter.contexts == {}
    assert loop.pool.num_free == loop.pool.num_pages


def test_off_for_a_while_keeps_the_context_in_step(scripted, make):
    """The scripted drafter asserts that rows come without a gap, and a proposal that its context reaches the base length."""
    drafter = scripted.Drafter()
    loop = make(drafter)
    loop.add(scripted.spec("a", [1, 2, 3], max_tokens=45))
    got, accepted = [], []
    for width, num_steps in ((3, 4), (0, 8), (3, 4)):
        loop.control.force(width)
        before = drafter.num_proposed
        for _ in range(num_steps):
            for delta in loop.step():
                got += delta.token_ids
        accepted.append(drafter.num_proposed - before)
    assert accepted[1] <= 1  # at most the one that was asked for ahead
    assert accepted[2] >= 3
    loop.control.force(None)
    tokens, last = scripted.run(loop)["a"]
    assert got + tokens == scripted.continuation([1, 2, 3], 45)
    assert last.stats["num_accepted_draft_tokens"] > 12
    assert last.stats["num_plain_steps"] >= 7


def test_the_width_of_a_step_does_not_see_its_own_tokens(scripted):
    """Two drafters that agree up to step k and then propose differently: the widths agree up to step k included."""

    def widths(spoiled_from):
        drafter = scripted.Drafter(lambda request_id, base_len, slot: base_len >= spoiled_from and slot == 0)
        ticks = itertools.count()
        loop = scripted.make_loop(drafter, draft_width="auto", clock=lambda: next(ticks) * 0.001)
        for rows in (1, 2, 3, 4, 8, 16):
            loop.control.verify_times.observe(1, rows, 0.0015 + 0.0010 * rows)
            loop.control.draft_times.observe(1, rows, 0.0002)
        chosen, bases = [], []
        decide, collect = loop.control.decide, drafter.collect

        def watched(load):
            decision = decide(load)
            if load.num_requests:
                chosen.append(decision)
                bases.append(loop.scheduler.get("a").num_computed)
            return decision

        loop.control.decide, drafter.collect = watched, collect
        tokens, _ = scripted.run(loop, [scripted.spec("a", [1], max_tokens=55)])["a"]
        assert tokens == scripted.continuation([1], 55)
        return list(zip(bases, chosen, strict=True))

    never, late = widths(10_000), widths(25)
    first_different = next(i for i, (base, _) in enumerate(never) if base >= 25)
    assert never[: first_different + 1] == late[: first_different + 1]


def test_the_load_has_counts_only(scripted):
    """What a decision gets from the loop does not change with tokens, drafts or texts."""
    loads = []
    for prompt, pattern in (([1, 2], "ALL"), ([9, 4], "NONE")):
        loop = scripted.make_loop(scripted.Drafter(scripted.PATTERNS[pattern]), draft_width="auto")
        for i in range(3):
            loop.add(scripted.spec(f"r{i}", prompt, max_tokens=30, num_speculative_tokens=i))
        loop.step()
        loads.append(loop._load())
    assert loads[0] == loads[1] == Load(((0, 1), (1, 1), (2, 1)))


@pytest.mark.parametrize("kind", LOOPS)
def test_load_decides_in_a_running_loop(scripted, kind):
    """Virtual clock: a row costs as much as a step, so a batch decodes plainly; alone, rows are free and it drafts fully."""
    drafter = scripted.Drafter()
    loop = scripted.make_loop(drafter, draft_width="auto", clock=lambda: 0.0, **LOOPS[kind])
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for requests in (1, 4, 8):
            loop.control.verify_times.observe(requests, rows, 0.010 if rows <= 4 else 0.010 + 0.010 * (rows - 4))
            loop.control.draft_times.observe(requests, rows, 0.001)
    specs = [scripted.spec(f"r{i}", [i], max_tokens=12 if i else 50) for i in range(8)]
    widths = []
    results = scripted.run(loop, specs, on_step=lambda step: widths.append(loop.control.width))
    assert 0 in widths
    assert loop.control.width == 3
    assert loop.describe()["step_control"]["num_switches"] >= 2
    for i in range(8):
        assert results[f"r{i}"][0] == scripted.continuation([i], 50 if i == 0 else 12)
        assert results[f"r{i}"][1].stats["skipped_reason"] is None
    assert results["r0"][1].stats["num_plain_steps"] > 0
    assert results["r0"][1].stats["num_accepted_draft_tokens"] > 0


def test_the_last_blocks_share_one_draft_pass_where_that_is_free(scripted):
    drafter = scripted.Drafter()
    loop = scripted.make_loop(drafter, draft_width="auto", clock=lambda: 0.0)
    for rows in (1, 4, 16, 64):
        loop.control.draft_times.observe(1, rows, 0.010 + 1e-6 * rows)
    asked = []
    collect = drafter.collect
    drafter.collect = lambda wanted, deadline_s=None: asked.append({want.width for want in wanted}) or collect(wanted)
    results = scripted.run(loop, [scripted.spec(f"r{i}", [i], max_tokens=7 + i) for i in range(6)])
    assert all(len(widths) == 1 for widths in asked)
    for i in range(6):
        assert results[f"r{i}"][0] == scripted.continuation([i], 7 + i)


def test_a_prompt_beyond_the_drafters_range_sends_it_nothing(scripted, make):
    drafter = scripted.Drafter()
    loop = make(drafter, drafter_max_model_len=32)
    results = scripted.run(
        loop, [scripted.spec("long", range(40), max_tokens=8), scripted.spec("short", [1], max_tokens=20)]
    )
    assert results["long"][0] == scripted.continuation(range(40), 8)
    assert results["long"][1].stats["skipped_reason"] == "context_too_long"
    assert results["short"][1].stats["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("settings", [{}, {"max_model_len": 12, "max_num_seqs": 2}, {"num_kv_pages": 17}])
def test_warm_up_fills_the_tables_and_leaves_no_trace(scripted, make, settings):
    drafter = scripted.Drafter()
    loop = make(drafter, **settings)
    warm_up(loop)
    facts = loop.describe()
    assert loop.control.verify_times.measured
    assert loop.control.draft_times.measured
    assert loop.control.acceptance.by_slot() == (0.75,) * 3
    for count in (
        "num_steps",
        "num_preemptions",
        "num_dropped_proposals",
        "num_requests_running",
        "num_requests_waiting",
    ):
        assert facts[count] == 0, count
    control = facts["step_control"]
    assert control["num_switches"] == control["num_probes"] == 0
    assert control["tokens_per_step"] is None
    assert drafter.contexts == {}
    assert loop.pool.num_free == loop.pool.num_pages
    tokens, last = scripted.run(loop, [scripted.spec("a", [1], max_tokens=9)])["a"]
    assert tokens == scripted.continuation([1], 9)
    assert last.stats["num_accepted_draft_tokens"] > 0


def test_a_fixed_width_measures_nothing(scripted):
    loop = scripted.make_loop(scripted.Drafter())
    measure(loop)
    scripted.run(loop, [scripted.spec("a", [1], max_tokens=9)])
    assert not loop.control.verify_times.measured
    assert loop.describe()["step_control"]["width"] == 3


def test_prefill_chunks_teach_no_verify_times(scripted):
    loop = scripted.make_loop(scripted.Drafter(), draft_width="auto", max_num_seqs=2, max_num_batched_tokens=8)
    seen = []
    observe = StepTimes.observe
    loop.control.verify_times.observe = lambda *values: (
        seen.append(values[:2]) or observe(loop.control.verify_times, *values)
    )
    scripted.run(loop, [scripted.spec("s", [4], max_tokens=12), scripted.spec("l", range(40), max_tokens=4)])
    assert seen
    assert all(rows <= requests * 4 for requests, rows in seen)
    assert loop.control.prefill_times.measured
