"""vLLM's way of counting drafts."""

from dataclasses import asdict

from dflash2_ray.core.spec_counters import SpecCounters


def test_the_vectors_of_three_steps():
    counters = SpecCounters.of_width(7)
    for accepted in (7, 0, 3):
        counters.record(7, accepted)
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (3, 21, 10)
    assert counters.accepted_per_position == [2, 2, 2, 1, 1, 1, 1]
    assert round(counters.num_accepted_tokens / counters.num_draft_tokens, 3) == 0.476
    assert round(counters.acceptance_length, 2) == 4.33
    before = asdict(counters)
    counters.record(0, 0)
    assert asdict(counters) == before


def test_the_loop_counts_before_the_cut(scripted):
    """The last block is cut by the limit; what was accepted counts all the same."""
    loop = scripted.make_loop(scripted.Drafter())
    scripted.run(loop, [scripted.spec("r", [1, 2, 3], max_tokens=6)])
    counters = loop.describe()["spec_counters"]
    assert counters["num_drafts"] == 2
    assert counters["num_accepted_tokens"] >= 4
    loop.forget_history()
    assert loop.describe()["spec_counters"]["num_drafts"] == 0
