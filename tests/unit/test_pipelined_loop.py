"""The pipelined loop against the serial one: the same tokens whatever the schedule, with proposals asked for ahead."""

import itertools
import random

import pytest

from dflash2_ray.runtime.pipelined_loop import PipelinedLoop

PATTERN_NAMES = ["ALL", "NONE", "P1", "P2", "MIX"]


def asynchronous(scripted):
    """A scripted drafter that drafts when asked, keeps the proposal until it is collected, and drops it when its request closes."""

    class Ahead(scripted.Drafter):
        def __init__(self, *args):
            super().__init__(*args)
            self.ready = {}
            self.asks = []
            self.num_collected = 0

        def send(self, messages):
            super().send(messages)
            for message in messages:
                if type(message).__name__ == "Close":
                    self.ready.pop(message.request_id, None)

        def ask(self, wanted):
            self.asks.append([want.request_id for want in wanted])
            for want in wanted:
                assert self.contexts[want.request_id].epoch == want.epoch
                (self.ready[want.request_id],) = super().collect([want])

        def collect(self, wanted, deadline_s=None):
            proposals = [self.ready.pop(want.request_id) for want in wanted if want.request_id in self.ready]
            self.num_collected += len(proposals)
            return proposals

    return Ahead


def make_split(scripted, drafter, **settings):
    settings = {"pipeline": "split", "drafter_placement": "separate", **settings}
    return scripted.make_loop(drafter, loop_class=PipelinedLoop, **settings)


@pytest.mark.parametrize("pipeline", ["split", "auto"])
@pytest.mark.parametrize("pattern", PATTERN_NAMES)
@pytest.mark.parametrize("concurrency", [1, 2, 5, 8])
def test_the_schedule_changes_no_token(scripted, pattern, concurrency, pipeline):
    drafter = asynchronous(scripted)(scripted.PATTERNS[pattern])
    loop = make_split(scripted, drafter, max_num_seqs=concurrency, pipeline=pipeline)
    specs = [scripted.spec(f"r{i}", range(i + 1), max_tokens=20 + i) for i in range(12)]
    results = scripted.run(loop, specs)
    serial = scripted.run(scripted.make_loop(scripted.Drafter(scripted.PATTERNS[pattern])), specs)
    for request_id, (tokens, last) in results.items():
        assert tokens == serial[request_id][0] == scripted.continuation(range(int(request_id[1:]) + 1), len(tokens))
        assert last.stats == serial[request_id][1].stats  # fixed width: the very same blocks
    assert loop.pool.num_free == loop.pool.num_pages
    assert drafter.contexts == {}
    assert drafter.ready == {}
    assert loop.num_dropped_proposals == 0


def test_halves_are_drafted_while_the_other_is_verified(scripted):
    drafter = asynchronous(scripted)()
    loop = make_split(scripted, drafter)
    for i in range(6):
        loop.add(scripted.spec(f"r{i}", [i], max_tokens=40))
    loop.step()  # prefill of all
    forward = loop.runner.forward
    in_flight = []

    def watched(batch):
        in_flight.append((len(batch.row_starts), len(drafter.ready)))
        return forward(batch)

    loop.runner.forward = watched
    for _ in range(8):
        loop.step()
    assert in_flight[1:] == [(3, 3)] * 7  # three in the pass, three proposals of the others on their way


def test_no_half_runs_twice_in_a_row_and_they_stay_balanced(scripted):
    loop = make_split(scripted, asynchronous(scripted)(), max_num_seqs=8)
    for i in range(8):
        loop.add(scripted.spec(f"r{i}", [i], max_tokens=5 + 5 * i))
    loop.step()
    stepped = []
    while loop.has_work:
        deltas = loop.step()
        stepped.append({delta.request_id for delta in deltas})
        sizes = [list(loop._groups.values()).count(half) for half in (0, 1)]
        assert abs(sizes[0] - sizes[1]) <= 1
    assert all(not (one & two) for one, two in itertools.pairwise(stepped[:9]))


@pytest.mark.parametrize("pattern", PATTERN_NAMES)
def test_preemption_while_the_other_half_is_in_flight(scripted, pattern):
    drafter = asynchronous(scripted)(scripted.PATTERNS[pattern])
    loop = make_split(scripted, drafter, max_num_seqs=6, num_kv_pages=18)
    specs = [scripted.spec(f"r{i}", [i, i + 1, i + 2], max_tokens=40) for i in range(6)]
    results = scripted.run(loop, specs)
    assert loop.scheduler.num_preemptions > 0
    for i in range(6):
        assert results[f"r{i}"][0] == scripted.continuation([i, i + 1, i + 2], 40)
        assert (results[f"r{i}"][1].stats["num_accepted_draft_tokens"] > 0) == (pattern != "NONE")
    assert loop.pool.num_free == 18
    assert drafter.contexts == {}


def test_an_error_ends_one_half_and_not_the_other(scripted):
    loop = make_split(scripted, asynchronous(scripted)())
    for i in range(4):
        loop.add(scripted.spec(f"r{i}", [i], max_tokens=30))
    loop.step()
    loop.step()
    forward, loop.runner.forward = loop.runner.forward, None
    deltas = loop.step()
    failed = {delta.request_id for delta in deltas}
    assert len(failed) == 2
    assert all(delta.finish_reason == "error" for delta in deltas)
    loop.runner.forward = forward
    results = scripted.run(loop)
    assert set(results) == {f"r{i}" for i in range(4)} - failed
    for _, last in results.values():
        assert last.finish_reason == "length"
        assert last.stats["num_accepted_draft_tokens"] > 0
    assert loop.pool.num_free == loop.pool.num_pages


@pytest.mark.parametrize("where", ["ask", "collect"])
def test_a_drafter_that_fails_costs_no_answer(scripted, where):
    drafter = asynchronous(scripted)()
    real, calls = getattr(drafter, where), iter(range(1000))

    def failing(*args):
        if next(calls) == 5:
            raise RuntimeError("drafter broke")
        return real(*args)

    setattr(drafter, where, failing)
    loop = make_split(scripted, drafter)
    specs = [scripted.spec(f"r{i}", [i], max_tokens=30) for i in range(4)]
    results = scripted.run(loop, specs)
    for i in range(4):
        assert results[f"r{i}"][0] == scripted.continuation([i], 30)
    reasons = [last.stats["skipped_reason"] for _, last in results.values()]
    assert reasons.count("drafter_unavailable") == 2


def test_late_proposals_decode_plainly_in_the_same_step(scripted):
    class Late(asynchronous(scripted)):
        def collect(self, wanted, deadline_s=None):
            late = [want for want in wanted if want.base_len % 3 == 0]
            for want in late:
                self.ready.pop(want.request_id, None)
            return super().collect([want for want in wanted if want not in late])

    loop = make_split(scripted, Late())
    results = scripted.run(loop, [scripted.spec(f"r{i}", [i], max_tokens=30) for i in range(4)])
    for i in range(4):
        assert results[f"r{i}"][0] == scripted.continuation([i], 30)
        assert results[f"r{i}"][1].stats["num_plain_steps"] > 0
        assert results[f"r{i}"][1].stats["skipped_reason"] is None


def test_prefill_fills_the_wait_for_proposals(scripted):
    """The virtual clock stands still while nobody waits, so a proposal just asked for is always a known time away."""
    drafter = asynchronous(scripted)()
    loop = make_split(
        scripted, drafter, clock=lambda: 0.0, max_model_len=128, drafter_max_model_len=128, num_kv_pages=200
    )
    for rows in (8, 16, 32):
        for count in (1, 2):
            loop.control.draft_times.observe(count, rows, 0.010)
        loop.control.prefill_times.observe(1, rows, rows * 0.001)
    loop.add(scripted.spec("a", [1], max_tokens=40))
    loop.step()
    loop.add(scripted.spec("long", [p % 250 for p in range(90)], max_tokens=5))
    chunks = scripted.computed(loop)
    results = scripted.run(loop)
    assert 10 in chunks  # as long as a draft takes
    assert results["long"][0] == scripted.continuation([p % 250 for p in range(90)], 5)
    assert results["long"][1].stats["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes(scripted, seed):
    """Arrivals, aborts, stops, chunked prefill, few pages, own widths: always the serial text, never a leak."""
    chance = random.Random(seed)
    names = list(scripted.PATTERNS)
    drafter = asynchronous(scripted)(scripted.PATTERNS[chance.choice(names)])
    loop = make_split(
        scripted,
        drafter,
        pipeline=chance.choice(["split", "auto"]),
        max_num_seqs=chance.choice([2, 3, 7]),
        num_kv_pages=chance.choice([18, 24, 64]),
        max_num_batched_tokens=chance.choice([28, 40, 64]),
        draft_width=chance.choice(["auto", "fixed"]),
        drafter_max_model_len=chance.choice([30, 64]),
    )
    specs, aborted = [], set()
    for i in range(14):
        prompt = [chance.randrange(250) for _ in range(chance.randrange(1, 30))]
        options = {"max_tokens": chance.randrange(1, 30)}
        if chance.random() < 0.3:
            options["num_speculative_tokens"] = chance.randrange(4)
        if chance.random() < 0.3:
            options["stop_token_ids"] = (scripted.continuation(prompt, 10)[-1],)
        specs.append(scripted.spec(f"r{i}", prompt, **options))
    waiting = list(specs)
    results = {}
    for _ in range(5000):
        while waiting and chance.random() < 0.4:
            loop.add(waiting.pop())
        if chance.random() < 0.05:
            victim = f"r{chance.randrange(14)}"
            if loop.scheduler.get(victim):
                loop.abort(victim)
                aborted.add(victim)
        for delta in loop.step():
            tokens, _ = results.get(delta.request_id, ([], None))
            results[delta.request_id] = (tokens + list(delta.token_ids), delta)
        if not waiting and not loop.has_work:
            break
    assert not loop.has_work, "the loop does not come to an end"
    serial = scripted.run(scripted.make_loop(num_kv_pages=64), specs)
    for one in specs:
        if one.request_id not in aborted:
            tokens, last = results[one.request_id]
            assert tokens == serial[one.request_id][0]
            assert (last.finish_reason, last.stop_reason) == (
                serial[one.request_id][1].finish_reason,
                serial[one.request_id][1].stop_reason,
            )
    assert loop.pool.num_free == loop.pool.num_pages
    assert drafter.contexts == {}
    assert loop._asked == {}
