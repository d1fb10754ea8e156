"""Requests that begin alike, on scripted models: the next token is a hash of the whole prefix as read back from the pages, and the
drafter refuses context rows that are not the committed tokens at their positions (cases B23, B24)."""

import random

import pytest

from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime.pipelined_loop import PipelinedLoop
from dflash2_ray.runtime.target_loop import TargetLoop

PROMPT = [p % 250 for p in range(3, 36)]  # 33 tokens: eight pages of four, and one token


@pytest.fixture
def guarded(scripted):
    """A loop whose passes write only to pages that one request reads and that have no key."""

    def make(*args, **settings):
        loop = scripted.make_loop(*args, **settings)
        forward = loop.runner.forward

        def checked(batch):
            for page in set((batch.attention.slots // loop.config.page_size).tolist()):
                assert page not in loop.pool.cache, f"page {page} is shared and written"
                assert sum(page in loop.pool.table(owner) for owner in loop.pool.owners) == 1
            return forward(batch)

        loop.runner.forward = checked
        return loop

    return make


def test_the_same_prompt_again_computes_one_token(scripted, guarded):
    drafter = scripted.Drafter(scripted.PATTERNS["MIX"])
    loop = guarded(drafter)
    cold = scripted.run(loop, [scripted.spec("aa", PROMPT, max_tokens=20)])["aa"]
    rows = scripted.computed(loop)
    warm = scripted.run(loop, [scripted.spec("bb", PROMPT, max_tokens=20)])["bb"]
    assert rows[0] == 1
    assert warm[0] == cold[0] == scripted.continuation(PROMPT, 20)
    assert warm[1].stats == cold[1].stats
    assert warm[1].stats["num_accepted_draft_tokens"] > 0
    assert loop.pool.num_free == loop.pool.num_pages
    assert loop.pool.cache.num_queried_tokens == 66
    assert loop.pool.cache.num_hit_tokens == 32
    assert drafter.contexts == {}


def test_a_prompt_of_whole_pages_leaves_the_last_one_to_compute(scripted, guarded):
    loop = guarded(scripted.Drafter())
    for name in ("a", "b"):
        assert scripted.run(loop, [scripted.spec(name, PROMPT[:32], max_tokens=9)])[name][0] == scripted.continuation(
            PROMPT[:32], 9
        )
    assert loop.pool.cache.num_hit_tokens == 28


def test_the_next_turn_starts_behind_the_answer(scripted, guarded):
    loop = guarded(scripted.Drafter())
    answer = scripted.run(loop, [scripted.spec("a", PROMPT, max_tokens=15)])["a"][0]
    turn = [*PROMPT, *answer, 1, 2]
    tokens, last = scripted.run(loop, [scripted.spec("b", turn, max_tokens=8)])["b"]
    assert tokens == scripted.continuation(turn, 8)
    assert last.stats["num_accepted_draft_tokens"] > 0
    assert (
        loop.pool.cache.num_hit_tokens == 44
    )  # 47 tokens have keys and values: the last one of the answer never got any


def test_b23_requests_that_share_pages_side_by_side(scripted, guarded):
    loop = guarded(scripted.Drafter(scripted.PATTERNS["P1"]), num_kv_pages=128)
    scripted.run(loop, [scripted.spec("first", PROMPT, max_tokens=1)])
    page_ids = loop.pool.cache.find(scripted_keys(PROMPT, 8))
    before = loop.runner.cache.view(-1, 4)[page_ids].clone()
    specs = [scripted.spec(f"r{i}", [*PROMPT[:32], i, *range(i)], max_tokens=20) for i in range(6)]
    results = scripted.run(loop, specs)
    for i in range(6):
        assert results[f"r{i}"][0] == scripted.continuation([*PROMPT[:32], i, *range(i)], 20)
    assert loop.pool.cache.num_hit_tokens == 6 * 32
    assert loop.runner.cache.view(-1, 4)[page_ids].equal(before)


def scripted_keys(token_ids, num_pages):
    from dflash2_ray.core.prefix_cache import extend_keys

    keys = []
    extend_keys(keys, token_ids, 4, num_pages)
    return keys


def test_b24_a_hit_behind_an_unrelated_request_in_the_same_slot(scripted, guarded):
    """The scripted drafter checks every row: stale ones of the neighbour, or rows at a shifted base, fail there."""
    loop = guarded(scripted.Drafter(scripted.PATTERNS["P2"]), max_num_seqs=1)
    cold = scripted.run(loop, [scripted.spec("a1", PROMPT, max_tokens=16)])["a1"]
    scripted.run(loop, [scripted.spec("xx", [9, 9, 9], max_tokens=16)])
    warm = scripted.run(loop, [scripted.spec("a2", PROMPT, max_tokens=16)])["a2"]
    assert warm[0] == cold[0]
    assert warm[1].stats == cold[1].stats
    assert loop.pool.cache.num_hit_tokens == 32


def test_pages_without_context_rows_serve_plain_requests_only(scripted, guarded):
    drafter = scripted.Drafter()
    loop = guarded(drafter)
    plain = {"max_tokens": 12, "num_speculative_tokens": 0}
    scripted.run(loop, [scripted.spec("plain", PROMPT, **plain)])
    assert scripted.run(loop, [scripted.spec("plain2", PROMPT, **plain)])["plain2"][0] == scripted.continuation(
        PROMPT, 12
    )
    assert loop.pool.cache.num_hit_tokens == 32
    drafted = scripted.run(loop, [scripted.spec("drafted", PROMPT, max_tokens=12)])["drafted"]
    assert loop.pool.cache.num_hit_tokens == 32  # no hit: what it would have to be told is not there
    assert drafted[1].stats["num_accepted_draft_tokens"] > 0
    again = scripted.run(loop, [scripted.spec("again", PROMPT, max_tokens=12)])["again"]
    assert again[1].stats == drafted[1].stats
    assert loop.pool.cache.num_hit_tokens == 64  # its pages took the place of those without rows
    assert loop.pool.num_free == loop.pool.num_pages


def test_beyond_the_drafters_range_pages_need_no_context_rows(scripted, guarded):
    loop = guarded(scripted.Drafter(), drafter_max_model_len=24, max_num_batched_tokens=16, max_num_seqs=4)
    for name in ("a", "b"):
        tokens, last = scripted.run(loop, [scripted.spec(name, PROMPT, max_tokens=9)])[name]
        assert tokens == scripted.continuation(PROMPT, 9)
        assert last.stats["skipped_reason"] == "context_too_long"
    assert loop.pool.cache.num_hit_tokens == 32


def test_a_request_of_one_step_leaves_context_rows_too(scripted, guarded):
    loop = guarded(scripted.Drafter())
    scripted.run(loop, [scripted.spec("one", PROMPT, max_tokens=1)])
    tokens, last = scripted.run(loop, [scripted.spec("two", PROMPT, max_tokens=12)])["two"]
    assert tokens == scripted.continuation(PROMPT, 12)
    assert last.stats["num_accepted_draft_tokens"] > 0
    assert loop.pool.cache.num_hit_tokens == 32


def test_prompt_logprobs_are_computed_for_every_token(scripted, guarded):
    loop = guarded(scripted.Drafter())
    first = scripted.spec("a", PROMPT, max_tokens=4, logprobs=1, prompt_logprobs=1)
    told = scripted.run(loop, [first])["a"][1]
    scripted.run(loop, [scripted.spec("b", PROMPT, max_tokens=4)])
    hits = loop.pool.cache.num_hit_tokens
    assert hits == 32
    collected = {}
    loop.add(scripted.spec("c", PROMPT, max_tokens=4, logprobs=1, prompt_logprobs=1))
    while loop.has_work:
        for delta in loop.step():
            if delta.prompt_logprobs is not None:
                collected[delta.request_id] = delta
    assert len(collected["c"].prompt_logprobs) == len(PROMPT)
    assert all(one is not None for one in collected["c"].prompt_logprobs[1:])
    assert loop.pool.cache.num_hit_tokens == hits
    assert loop.pool.cache.num_queried_tokens == len(PROMPT)
    assert told.finish_reason == "length"


def test_usage_is_told_once_with_the_first_token(scripted, guarded):
    loop = guarded(scripted.Drafter())
    scripted.run(loop, [scripted.spec("a", PROMPT, max_tokens=8)])
    loop.add(scripted.spec("b", PROMPT, max_tokens=8))
    told = []
    while loop.has_work:
        told += [delta.num_cached_tokens for delta in loop.step()]
    assert told[0] == 32
    assert not any(told[1:])


def test_a_resumed_request_starts_behind_its_cached_tokens(scripted, guarded):
    loop = guarded(scripted.Drafter(scripted.PATTERNS["MIX"]))
    reference = scripted.run(loop, [scripted.spec("aa", PROMPT, max_tokens=24)])["aa"][0]
    for emitted in (1, 7, 16, 23):
        resumed = RequestSpec(
            "aa", tuple(PROMPT), SamplingParams(temperature=0.0, max_tokens=24), tuple(reference[:emitted])
        )
        rows = scripted.computed(loop)
        tokens, _ = scripted.run(loop, [resumed])["aa"]
        assert reference[:emitted] + tokens == reference
        assert rows[0] <= 4


def test_switched_off_nothing_is_kept(scripted):
    loop = scripted.make_loop(scripted.Drafter(), enable_prefix_caching=False)
    rows = scripted.computed(loop)
    for name in ("a", "b"):
        start = len(rows)
        scripted.run(loop, [scripted.spec(name, PROMPT, max_tokens=9)])
        assert rows[start] == len(PROMPT)
    assert len(loop.pool.cache) == 0
    assert loop.kept_rows is None


def test_history_that_is_forgotten_leaves_no_prefix(scripted):
    loop = scripted.make_loop(scripted.Drafter())
    scripted.run(loop, [scripted.spec("a", PROMPT, max_tokens=9)])
    assert len(loop.pool.cache) > 0
    loop.forget_history()
    assert len(loop.pool.cache) == 0
    assert loop.numbers()["prefix_cache_queries"] == 0
    scripted.run(loop, [scripted.spec("b", PROMPT, max_tokens=9)])
    assert loop.pool.cache.num_hit_tokens == 0


@pytest.mark.parametrize("loop_class", [TargetLoop, PipelinedLoop])
@pytest.mark.parametrize("seed", range(12))
def test_any_load_under_pressure_is_what_it_is_without_a_cache(scripted, guarded, seed, loop_class):
    """Requests out of a few trees of prompts, come, are cancelled and are preempted; texts and histograms are those of a loop that caches
    nothing and has room for all."""
    chance = random.Random(seed)
    trunks = [[chance.randrange(250) for _ in range(chance.choice([8, 13, 24]))] for _ in range(3)]
    specs = []
    for index in range(30):
        trunk = chance.choice(trunks)
        prompt = [*trunk[: chance.randint(1, len(trunk))], *(chance.randrange(3) for _ in range(chance.randint(0, 6)))]
        width = chance.choice([None, None, None, 0, 2])
        name = f"r{index:02}"
        specs.append(
            scripted.spec(
                name,
                prompt,
                max_tokens=chance.randint(1, 24),
                **({} if width is None else {"num_speculative_tokens": width}),
            )
        )
    mix = scripted.PATTERNS["MIX"]
    plain = scripted.run(
        scripted.make_loop(scripted.Drafter(mix), num_kv_pages=400, enable_prefix_caching=False), specs
    )
    drafter = scripted.Drafter(mix)
    loop = guarded(
        drafter,
        loop_class=loop_class,
        num_kv_pages=chance.choice([18, 22, 40]),
        max_num_seqs=6,
        max_num_batched_tokens=chance.choice([28, 64]),
    )
    cancelled = {one.request_id for one in specs if chance.random() < 0.1}
    results = {}
    waiting = list(specs)
    while waiting or loop.has_work:
        for _ in range(chance.randint(0, 3)):
            if waiting:
                loop.add(waiting.pop(0))
        for name in cancelled:
            if chance.random() < 0.2:
                loop.abort(name)
        for delta in loop.step():
            results.setdefault(delta.request_id, []).append(delta)
    for request_id, (tokens, last) in plain.items():
        deltas = results.get(request_id, [])
        got = [token for delta in deltas for token in delta.token_ids]
        if request_id not in cancelled:
            assert got == tokens
            assert deltas[-1].stats == last.stats
        else:
            assert got == tokens[: len(got)]
    assert loop.pool.cache.num_hit_tokens > 0
    assert sum(last.stats["num_accepted_draft_tokens"] for _, last in plain.values()) > 0
    assert loop.pool.num_free == loop.pool.num_pages
    assert drafter.contexts == {}
