"""Where a traced request's time goes, added up by the step loop under a clock that the test owns, and carried to its front."""

from dataclasses import replace

import pytest

from dflash2_ray.core.phase_times import PhaseTimes
from dflash2_ray.core.wire import merge_deltas, pack_delta, pack_spec, unpack_delta, unpack_spec
from dflash2_ray.runtime.pipelined_loop import PipelinedLoop
from dflash2_ray.runtime.target_loop import TargetLoop


class Clock:
    """Each look at it takes a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("loop_class", [TargetLoop, PipelinedLoop])
def test_phases_add_up_to_the_steps(scripted, loop_class):
    clock, drafter = Clock(), scripted.Drafter()
    drafter.last_transfer_s = 0.25  # as the port of a drafter elsewhere says
    loop = scripted.make_loop(drafter, clock=clock, loop_class=loop_class, max_num_batched_tokens=8, max_num_seqs=2)
    traced = replace(scripted.spec("traced", range(10), max_tokens=9), traced=True)
    results = scripted.run(loop, [traced, scripted.spec("untraced", range(5), max_tokens=9)])
    assert results["untraced"][1].phases is None
    _, last = results["traced"]
    phases = unpack_delta(pack_delta(last)).phases
    assert (phases.num_prefill_steps, phases.num_decode_steps) == (2, 2)
    assert phases.num_draft_steps == last.stats["num_spec_steps"] == 2
    assert phases.transfer_s == pytest.approx(0.25 * phases.num_draft_steps)
    assert min(phases.queue_s, phases.prefill_s, phases.draft_s, phases.verify_s) >= 0.5
    assert phases.queue_s + phases.prefill_s + phases.draft_s + phases.transfer_s + phases.verify_s < clock.now


def test_a_request_that_waits_is_queued(scripted):
    clock = Clock()
    loop = scripted.make_loop(clock=clock, max_num_seqs=1)
    one = replace(scripted.spec("second", range(4), max_tokens=3), traced=True)
    results = scripted.run(loop, [scripted.spec("first", range(4), max_tokens=9), one])
    assert results["second"][1].phases.queue_s > 9
    assert results["second"][1].phases.num_draft_steps == 0


def test_times_travel_with_the_spec_and_the_newest_delta(scripted):
    untraced = scripted.spec("a", [1, 2])
    assert unpack_spec(pack_spec(untraced)) == untraced
    assert unpack_spec(pack_spec(replace(untraced, traced=True))).traced
    first, second = ({"token_ids": [1], "steps": [], "phases": PhaseTimes(0.0, float(n), 2.0).pack()} for n in range(2))
    assert merge_deltas(first, second)["phases"] == second["phases"]
    assert "phases" not in merge_deltas({"token_ids": [1], "steps": []}, {"token_ids": [2], "steps": []})
