"""Draft width and schedule on the embedded pair in fp32: greedy text is the same whatever is chosen, and sampling keeps its law."""

import itertools
import queue
import threading

import pytest

from dflash2_ray.core.ledger import Ledger
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime.drafter_runner import DrafterRunner
from dflash2_ray.runtime.pipelined_loop import PipelinedLoop
from dflash2_ray.runtime.target_loop import TargetLoop

NEW_TOKENS = 48
NUM_PROMPTS = 40


class ThreadedDraftPort:
    """A `DraftPort` whose drafter works in a thread of its own, so that asking ahead really runs ahead."""

    connected = True
    last_transfer_s = 0.0

    def __init__(self, runner):
        self.ledger = Ledger()
        self.runner = runner
        self._work = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._ready = {}
        self._asked = {}
        self.num_ahead = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while (job := self._work.get()) is not None:
            kind, payload = job
            if kind == "settle":
                payload.set()
                continue
            if kind == "send":
                self.runner.apply(payload)
                continue
            found = {proposal.request_id: proposal for proposal in self.runner.propose(payload)}
            with self._arrived:
                for want in payload:
                    self._ready[want.request_id, want.epoch, want.base_len] = found.get(want.request_id)
                self._arrived.notify_all()

    def send(self, messages):
        self._work.put(("send", list(messages)))

    def ask(self, wanted):
        self._work.put(("ask", list(wanted)))

    def collect(self, wanted, deadline_s=None):
        keys = [(want.request_id, want.epoch, want.base_len) for want in wanted]
        with self._arrived:
            self.num_ahead += sum(key in self._ready for key in keys)
            assert self._arrived.wait_for(lambda: all(key in self._ready for key in keys), timeout=60)
            proposals = [self._ready.pop(key) for key in keys]
        return [proposal for proposal in proposals if proposal is not None]

    def settle(self):
        """Wait until everything sent so far has been applied."""
        done = threading.Event()
        self._work.put(("settle", done))
        assert done.wait(timeout=60)

    def counters(self):
        return dict(self.runner.counters)

    def close(self):
        self._work.put(None)
        self._thread.join(timeout=60)
        self.runner.close()


def run(loop, specs, each_step=None):
    tokens, stats = {}, {}
    for spec in specs:
        loop.add(spec)
    while loop.has_work:
        if each_step:
            each_step()
        for delta in loop.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                assert delta.finish_reason == "length", delta.error
                stats[delta.request_id] = delta.stats
    return tokens, stats


def wide_at_first(loop, num_steps=8):
    """The first steps draft in full width whatever was measured, so that a slow machine does not decide what is tested."""
    steps = itertools.count()
    return lambda: loop.control.force(loop.config.num_speculative_tokens if next(steps) < num_steps else None)


@pytest.fixture(scope="module")
def specs(prompts):
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [RequestSpec(f"r{i}", tuple(prompts[i * 5]), params) for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def plain(embedded, specs):
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, num_speculative_tokens=0)
    return run(embedded(max_num_seqs=16)._loop, [RequestSpec(s.request_id, s.prompt_token_ids, params) for s in specs])[
        0
    ]


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_chosen_widths(embedded, specs, plain, concurrency):
    loop = embedded(max_num_seqs=concurrency, draft_width="auto")._loop
    tokens, stats = run(loop, specs, wide_at_first(loop))
    assert tokens == plain
    assert sum(one["num_accepted_draft_tokens"] for one in stats.values()) > 0
    assert loop.control.verify_times.measured


def test_every_width_in_turn(embedded, specs, plain):
    loop = embedded(max_num_seqs=16, draft_width="auto")._loop
    widths = itertools.cycle([7, 0, 3, 0, 0, 5, 1, 7])
    tokens, stats = run(loop, specs, lambda: loop.control.force(next(widths)))
    loop.control.force(None)
    assert tokens == plain
    assert all(one["num_accepted_draft_tokens"] > 0 and one["num_plain_steps"] > 0 for one in stats.values())
    assert loop.draft_port.counters() == {}  # nothing stale, nothing missing: the context was in step all the time


@pytest.mark.parametrize("pipeline", ["split", "auto"])
@pytest.mark.parametrize("settings", [{}, {"draft_width": "auto"}, {"num_kv_pages": 40, "max_model_len": 480}], ids=str)
def test_split_with_a_drafter_in_another_thread(embedded, specs, plain, pipeline, settings):
    from dataclasses import replace

    base = embedded(max_num_seqs=16, **settings)._loop
    port = ThreadedDraftPort(DrafterRunner(base.draft_port.runner.drafter, max_num_requests=16))
    config = replace(base.config, pipeline=pipeline, drafter_placement="separate")
    loop = PipelinedLoop(config, base.runner, port, vocab_size=base.vocab_size)
    adapts = "draft_width" in settings
    tokens, stats = run(loop, specs, wide_at_first(loop) if adapts else None)
    assert tokens == plain
    assert (any if adapts else all)(one["num_accepted_draft_tokens"] > 0 for one in stats.values())
    assert loop.pool.num_free == loop.pool.num_pages
    port.settle()
    counters = {name for name, count in port.counters().items() if count}
    assert counters <= {"stale_epoch", "unknown_request"}  # asks of preempted requests
    if not settings:
        assert counters == set()
    assert port.runner.num_requests == 0
    if pipeline == "split":
        assert port.num_ahead > 0
    loop.close()


def test_the_serial_loop_takes_the_same_port(embedded, specs, plain):
    base = embedded(max_num_seqs=16)._loop
    port = ThreadedDraftPort(DrafterRunner(base.draft_port.runner.drafter, max_num_requests=16))
    loop = TargetLoop(base.config, base.runner, port, vocab_size=base.vocab_size)
    assert run(loop, specs)[0] == plain
    loop.close()
