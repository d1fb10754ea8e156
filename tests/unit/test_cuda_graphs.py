"""Graphs on a pretended GPU: a step of the real engine is one launch per model, gives the tokens that it gives launch by launch, and what
stands for nobody in a bucket touches nothing."""

import itertools

import pytest
import torch
from recorded_graph import RecordedBackend

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.draft_port import Close, Commit, Open, Rows, RowSpan, Wanted
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime import build
from dflash2_ray.runtime.cuda_graphs import GraphPool, next_bucket

KINDS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}, {"temperature": 0.9, "seed": 6})


@pytest.fixture
def backends(kernels, monkeypatch):
    """The backends of an engine's graphs: the target's, the drafter's."""
    found = []

    def make():
        found.append(RecordedBackend())
        return found[-1]

    monkeypatch.setattr(build, "CudaBackend", make)
    return found


@pytest.fixture
def start(kernels):
    loops = []

    def build_loop(**keys):
        config = ServiceConfig.from_keys({
            "target": "embedded", "dtype": "float32", "device": "cuda", "max_num_seqs": 6, "num_kv_pages": 200, "max_model_len": 256,
            "draft_width": "fixed", "drafter_placement": "colocated", **keys,
        })  # fmt: skip
        loops.append(build.build_target_loop(config))
        return loops[-1]

    yield build_loop
    for loop in loops:
        loop.close()


def run(loop, num_requests, on_step=lambda num_drafted: None):
    """Texts of requests that come one by one and have different lengths, so that the batch changes from step to step."""
    texts = {}
    arrivals = iter(range(num_requests))
    for _ in range(10_000):
        if (index := next(arrivals, None)) is not None:
            params = SamplingParams.from_keywords(
                max_tokens=20 + 12 * index, ignore_eos=True, **KINDS[index % len(KINDS)]
            )
            loop.add(RequestSpec(f"r{index}", tuple(range(40 + index, 60 + 2 * index)), params))
            texts[f"r{index}"] = []
        elif not loop.has_work:
            return texts
        decoding = [one for one in loop.scheduler.running if one.decodes]
        for delta in loop.step():
            assert delta.finish_reason != "error", delta.error
            texts[delta.request_id] += delta.token_ids
        on_step(len(decoding))
    raise AssertionError("the loop does not come to an end")


def test_the_tokens_are_those_of_single_launches_and_a_step_is_few_launches(gpu, backends, start):
    launches = []

    def note(num_decoding):
        launches.append((num_decoding, gpu.num_launches))
        gpu.num_launches = 0

    single = start(cuda_graphs="off")
    assert single.describe()["cuda_graphs"] == {}
    expected = run(single, 6, note)
    fewest = min(count for num_decoding, count in launches if num_decoding)
    launches.clear()
    loop = start()
    replays = []

    def note_replays(num_decoding):
        note(num_decoding)
        replays.append([backend.num_replays for backend in backends])

    assert run(loop, 6, note_replays) == expected
    assert loop.spec_counters.acceptance_length > 1, "nothing was drafted"
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(replays)]
    assert [max(of_backend) for of_backend in zip(*steps, strict=True)] == [1] * len(backends)
    assert min(count for num_decoding, count in launches if num_decoding) < fewest / 2
    told = loop.describe()["cuda_graphs"]
    assert set(told) == {"verification", "draft"}
    for pool in (loop.runner.verify_graphs.graphs, loop.draft_port.graphs):
        num_captures = len(pool.backend.captures)
        assert num_captures >= 4, "one bucket is no change of batches"
        replays = pool.backend.num_replays - num_captures  # the first one of a bucket is compared with single launches
        assert told[pool.name] == {"num_graphs": num_captures, "num_replays": replays, "failure": None}
        assert replays > 0


def slots_of_nobody(loop):
    """(tensors, their slots that no request holds): of the target's cache, of the drafter's contexts."""
    held = {page for one in loop.scheduler.running for page in loop.pool.table(one.request_id)}
    free = set(range(loop.pool.num_pages)) - held
    contexts = loop.draft_port.runner.rounds.pages
    for tensors, pages in ((loop.runner.cache.layers, free), ([contexts.rows], contexts.free_pages)):
        yield [one.inner for one in tensors], {page * 16 + row for page in pages for row in range(16)}


def test_rows_that_only_fill_a_bucket_touch_nothing(backends, start):
    loop = start()
    before, running, num_checks = [], set(), 0

    def check(num_decoding):
        """What was nobody's a step ago and is now still holds the pattern, unless somebody came and went with it."""
        nonlocal num_checks
        ids = {one.request_id for one in loop.scheduler.running}
        now = list(slots_of_nobody(loop))
        for (tensors, slots), (_, slots_before) in zip(now, before or now, strict=True):
            for one in tensors:
                if before and running <= ids:
                    num_checks += num_decoding
                    assert bool((one[sorted(slots & slots_before)] == -1e30).all()), "somebody wrote to pages of nobody"
                one[sorted(slots)] = -1e30
        before[:] = now
        running.clear()
        running.update(ids)

    with torch.inference_mode():
        run(loop, 6, check)
    assert num_checks > 20
    assert all(pool.backend.num_replays > 4 for pool in (loop.runner.verify_graphs.graphs, loop.draft_port.graphs))


def test_pages_of_contexts_are_given_back_and_missing_ones_cost_the_draft_only(backends, start):
    loop = start()
    runner = loop.draft_port.runner
    pages = runner.rounds.pages.free_pages
    whole = sorted(pages)
    expected = run(loop, 3)
    assert sorted(pages) == whole
    rows = torch.zeros(20, runner.drafter.config.hidden_size)
    messages = [Open("a", 0, 0.0, 0), Rows((RowSpan("a", 0, 0, 20),), rows), Commit("a", 0, 20, 5)]
    runner.apply([*messages, Close("a", 0)])  # gone before its rows were taken in
    assert sorted(pages) == whole
    runner.apply(messages)
    kept = pages[:]
    pages.clear()
    assert runner.propose([Wanted("a", 0, 20, 7)])[0].token_ids, "twenty rows and a block have room in two pages"
    assert runner.propose([Wanted("a", 0, 20, 14)]) == []
    assert runner.counters["no_room"] == 1
    pages += kept
    runner.apply([Open("a", 1, 0.0, 0)])  # anew, with nothing
    assert sorted(pages) == whole
    pages.clear()
    assert run(loop, 3) == expected
    assert runner.counters["no_room"] > 1


def test_a_request_behind_cached_pages_is_drafted_for_as_without(backends, start):
    def answers(loop):
        """Of one prompt asked twice, one after the other, with what was accepted."""
        texts = []
        for index in range(2):
            loop.add(
                RequestSpec(
                    f"r{index}",
                    tuple(range(40, 90)),
                    SamplingParams.from_keywords(max_tokens=24, ignore_eos=True, temperature=0.0),
                )
            )
            texts.append(
                [
                    token
                    for _ in iter(lambda: loop.has_work, False)
                    for delta in loop.step()
                    for token in delta.token_ids
                ]
            )
        return texts, loop.spec_counters

    expected = answers(start(cuda_graphs="off", enable_prefix_caching=False))
    loop = start()
    assert answers(loop) == expected
    assert expected[1].num_accepted_tokens > 0
    assert loop.pool.cache.num_hit_tokens == 48
    assert all(pool.backend.num_replays > 4 for pool in (loop.runner.verify_graphs.graphs, loop.draft_port.graphs))


def test_a_refused_capture_leaves_single_launches_and_says_why(backends, start, caplog):
    expected = run(start(cuda_graphs="off"), 2)
    loop = start()
    for backend in backends:
        backend.refuse = "operation not permitted"
    assert run(loop, 2) == expected
    for told in loop.describe()["cuda_graphs"].values():
        assert told == {"num_graphs": 0, "num_replays": 0, "failure": "RuntimeError: operation not permitted"}
    assert sum("without CUDA graphs" in message for message in caplog.messages) == len(backends)


def test_what_a_capture_cannot_hold_is_refused(gpu):
    value = torch.arange(4.0).to("cuda")
    with torch.inference_mode():
        for launch in (
            lambda: value.sum().item(),
            lambda: value[value > 1],
            lambda: value.nonzero(),
            lambda: value + torch.ones(4).to("cuda"),
            value.tolist,
        ):
            with pytest.raises(RuntimeError, match="capturing"):
                RecordedBackend().capture(launch)


def test_a_replay_works_on_the_static_tensors_and_must_agree_with_single_launches(gpu):
    pool = GraphPool("sums", RecordedBackend())
    static = torch.zeros(4, device="cuda")
    kept = []

    def launch():
        kept.append(len(kept))  # what the host does is not part of a graph
        return {"sum": (static * 2).sum(0, keepdim=True)}

    with torch.inference_mode():
        for number in (1.0, 2.0, 3.0):
            static.copy_(torch.full((4,), number))
            assert pool.run("four", launch)["sum"].tolist() == [8 * number]
        assert len(kept) == 2
        assert pool.describe() == {"num_graphs": 1, "num_replays": 2, "failure": None}
        numbers = iter((1.0, 2.0))  # the capture holds another number than the launches before it
        assert pool.run("other", lambda: {"sum": static * next(numbers)})["sum"].tolist() == [3.0] * 4
    assert "other sum" in pool.failure


def test_buckets_grow_and_never_exceed_what_there_is():
    assert [next_bucket(count, 100) for count in (1, 2, 3, 5, 8, 9, 17, 25, 33, 48, 49, 97)] == [
        1,
        2,
        4,
        8,
        8,
        16,
        24,
        32,
        48,
        48,
        64,
        100,
    ]
    assert next_bucket(5, 6) == 6
