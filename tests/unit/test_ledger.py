"""Counting: the step loop's ledger, a unit's book of requests, and the books of all units, which never go back."""

import asyncio
from types import SimpleNamespace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_ray.core.books import Books
from dflash2_ray.core.ledger import Generations, Ledger, add_up, growth_since
from dflash2_ray.core.request_book import RequestBook
from dflash2_ray.engine.bookkeeper import Bookkeeper
from dflash2_ray.engine.ray_mirror import values_in
from dflash2_ray.engine.unit_reporter import UnitReporter

FACTS = {"model": "m", "num_speculative_tokens": 7, "most_tokens_per_step": 8, "max_model_len": 100, "sglang": False}
GROWTH = st.dictionaries(st.sampled_from(["a", "b/x", "b/y", "c/0"]), st.integers(0, 5))


def spec(request_id="r", prompt=3, output=0, max_tokens=20):
    return {
        "request_id": request_id,
        "prompt_token_ids": list(range(prompt)),
        "output_token_ids": list(range(output)),
        "params": {"max_tokens": max_tokens},
    }


def item(num_tokens, *steps, finish_reason=None, request_id="r"):
    return {
        "request_id": request_id,
        "token_ids": list(range(num_tokens)),
        "steps": list(steps),
        "finish_reason": finish_reason,
    }


def booked(*items, **opened):
    """Numbers of one request whose items come a second apart."""
    ledger, clock = Ledger(), iter(range(1, 100))
    book = RequestBook(ledger, lambda: next(clock))
    book.open(spec(**opened), 1, 0)
    for one in items:
        book.take(one)
    return book, ledger.numbers


def test_ledgers_add_and_subtract_and_travel():
    ledger = Ledger()
    for value in (0.5, 1, 3, 100):
        ledger.observe("params_n", value)
    ledger.observe("params_n", 2, count=3)
    ledger.add("request_success/stop")
    ledger.add("num_drafts", 0)
    assert ledger.numbers == {
        "params_n/0": 2,
        "params_n/1": 3,
        "params_n/2": 1,
        "params_n/5": 1,
        "params_n/sum": 110.5,
        "request_success/stop": 1,
    }
    before = ledger.copy()
    ledger.observe("params_n", 1)
    growth = growth_since(before, ledger.numbers)
    assert growth == {"params_n/0": 1, "params_n/sum": 1}
    add_up(before, growth)
    assert before == ledger.numbers == msgpack.unpackb(msgpack.packb(ledger.numbers))


def test_a_stop_behind_the_third_accepted_draft_is_cut():
    """Seven accepted, the end of text at the third: the loop counts seven (`test_spec_counters`), the client got three."""
    _, numbers = booked(item(1), item(3, (7, 3, None), finish_reason="stop"))
    assert numbers["emitted_accepted_tokens"] == 2  # two, and the step's last token, which counts as its bonus
    assert numbers["acceptance_length/4"] == 1
    assert numbers["acceptance_length/sum"] == 3


def test_what_one_request_leaves_behind():
    _, numbers = booked(
        item(1), item(8, (7, 8, None)), item(1, (0, 1, "load")), item(4, (7, 4, None), finish_reason="length")
    )
    assert numbers["request_success/length"] == 1
    assert numbers["emitted_accepted_tokens"] == 10
    assert numbers["first_token_s/sum"] == 1
    assert numbers["inter_token_s/sum"] == 3
    assert (
        sum(count for key, count in numbers.items() if key.startswith("output_token_s/") and not key.endswith("sum"))
        == 13
    )
    assert numbers["output_token_s/sum"] == pytest.approx(3)
    assert numbers["time_per_token_s/sum"] == pytest.approx(3 / 13)
    assert numbers["end_to_end_s/sum"] == 5
    assert (numbers["request_prompt_tokens/sum"], numbers["request_generation_tokens/sum"]) == (3, 14)
    assert (numbers["params_max_tokens/sum"], numbers["params_n/sum"]) == (20, 1)


def test_a_stop_string_counts_what_the_client_got():
    book, numbers = booked(item(1), item(8, (7, 8, None)), item(6, (7, 6, None)))
    book.stopped("r", 1 + 8 + 2)
    book.close("r", "abort")  # the cancel behind it
    assert [key for key in numbers if key.startswith("request_success/")] == ["request_success/stop"]
    assert numbers["emitted_accepted_tokens"] == 7 + 1
    assert numbers["request_generation_tokens/sum"] == 11


def test_a_request_that_goes_on_elsewhere_is_told_once():
    book, first = booked(item(1), item(8, (7, 8, None)))
    book.close("r", None)
    _, second = booked(item(4, (7, 4, None), finish_reason="stop"), output=9)
    assert not any(key.startswith("request_success") for key in first)
    assert first["emitted_accepted_tokens"] + second["emitted_accepted_tokens"] == 10
    assert "first_token_s/sum" not in second
    assert second["request_generation_tokens/sum"] == 13
    book.take(item(3, request_id="unknown"))
    book.close("unknown", "abort")
    assert "request_success/abort" not in first


def test_the_loop_tells_steps_tokens_and_times(scripted):
    loop = scripted.make_loop(scripted.Drafter())
    scripted.run(
        loop,
        [
            scripted.spec("r", [1, 2, 3], max_tokens=6),
            scripted.spec("plain", [4, 5], max_tokens=3, num_speculative_tokens=0),
        ],
    )
    numbers = loop.numbers()
    assert (numbers["prompt_tokens"], numbers["generation_tokens"]) == (5, 9)
    assert numbers["spec_skipped/requested"] == 2
    assert numbers["num_drafts"] == sum(numbers[f"accepted_per_position/{index}"] >= 0 for index in range(2))
    count = {
        key: sum(value for name, value in numbers.items() if name.startswith(f"{key}/") and not name.endswith("sum"))
        for key in ("queue_s", "prefill_s", "decode_s", "inference_s", "verify_s", "iteration_tokens", "draft_wait_s")
    }
    assert count["queue_s"] == count["prefill_s"] == count["decode_s"] == count["inference_s"] == 2
    assert count["verify_s"] == count["iteration_tokens"] == loop.num_steps
    assert 0 < count["draft_wait_s"] < loop.num_steps
    assert numbers["iteration_tokens/sum"] == 5 + 9
    loop.forget_history()
    assert not any(loop.numbers().values())


@given(st.lists(st.tuples(st.booleans(), GROWTH), max_size=30))
def test_generations_never_go_back(events):
    """Ranks are lost at any time, and begin at nothing; what they had told stays."""
    generations, generation, current, expected, before = Generations(), 0, {}, {}, {}
    for lost, growth in events:
        if lost:
            generation, current = generation + 1, {}
        add_up(current, growth)
        add_up(expected, growth)
        generations.note(generation, dict(current))
        generations.note(generation - 1, {"a": 1000})  # too late
        total = generations.total()
        assert all(total.get(key, 0) >= value for key, value in before.items())
        before = total
    assert {key: value for key, value in generations.total().items() if value} == {
        key: value for key, value in expected.items() if value
    }


class Handle:
    """A Serve handle of a bookkeeper in this process. `fails`: before or behind the call, in turn."""

    def __init__(self, service, fails):
        self.service, self.fails = service, fails

    def __getattr__(self, method):
        async def remote(*arguments):
            how = self.fails.pop() if self.fails else None
            if how == "before":
                raise TimeoutError
            answer = await getattr(self.service.keeper, method)(*arguments)
            if how == "behind":
                raise TimeoutError
            return answer

        return SimpleNamespace(remote=remote)


def counter(unit):
    async def count():
        return dict(unit.numbers), {}, FACTS

    return count


async def reporting():
    """A clock, a service with its bookkeeper, and a unit whose reporter has told {"a": 1}."""
    clock = SimpleNamespace(now=0.0)
    service = SimpleNamespace(keeper=Bookkeeper(lambda: clock.now))
    clock.now += 10
    unit = SimpleNamespace(numbers={"a": 1.0}, fails=[])
    unit.reporter = UnitReporter(Handle(service, unit.fails), counter(unit), lambda: "0", lambda *told: None)
    assert await unit.reporter.report()
    return clock, service, unit


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            GROWTH,
            st.sampled_from(["", "", "unit", "keeper", "leaves"]),
            st.sampled_from([None, None, "before", "behind"]),
        ),
        max_size=40,
    )
)
def test_the_sum_of_all_units_never_goes_back(events):
    """Units are replaced and leave, answers get lost, and the bookkeeper is replaced: every growth that was told is in the sum once."""

    async def scenario():
        clock = SimpleNamespace(now=0.0)
        service = SimpleNamespace(keeper=Bookkeeper(lambda: clock.now))
        clock.now += 10
        units, expected, seen = {}, {}, {}
        for index, growth, event, failure in events:
            if event == "keeper" and units:  # somebody has a copy
                service.keeper = Bookkeeper(lambda: clock.now)
                for unit in units.values():
                    assert not await unit.reporter.report()
                clock.now += 10
                for unit in units.values():
                    await unit.reporter.report()
            if index not in units:
                units[index] = unit = SimpleNamespace(numbers={}, fails=[])
                unit.reporter = UnitReporter(
                    Handle(service, unit.fails), counter(unit), lambda index=index: str(index), lambda *told: None
                )
            unit = units[index]
            add_up(unit.numbers, growth)
            add_up(expected, growth)
            unit.fails[:] = [failure] if failure else []
            for _ in range(2):
                try:
                    assert await unit.reporter.report(last=event == "leaves")
                    break
                except TimeoutError:
                    unit.fails.clear()
            if event in ("unit", "leaves"):
                del units[index]
                clock.now += 4  # until it is missed
                for other in units.values():  # whoever lives has the copy
                    assert await other.reporter.report()
            total = {}
            for numbers in service.keeper._books.totals.values():
                add_up(total, numbers)
            assert {key: value for key, value in total.items() if value} == {
                key: value for key, value in expected.items() if value
            }
            assert all(total.get(key, 0) >= value for key, value in seen.items())
            seen = total

    asyncio.run(scenario())


def test_a_reader_waits_for_units_that_answer_and_for_no_others():
    async def scenario():
        clock = SimpleNamespace(now=10.0)
        keeper = Bookkeeper(lambda: clock.now)
        clock.now += 10
        told = {
            "engine": "0",
            "growth": {"a": 1},
            "facts": FACTS,
            "gauges": {"running": 1, "rank_up/target/0": 1},
            "last": False,
        }
        await keeper.report({**told, "source": "x", "number": 1, "round": 0})

        async def answer():
            round_ = await keeper.next_round(0)
            await keeper.report({**told, "source": "x", "number": 2, "round": round_})

        reading, _ = await asyncio.gather(keeper.read(), answer())
        assert reading["state"]["totals"] == {"0": {"a": 2}}
        assert reading["gauges"]["0"]["running"] == 1
        clock.now += 6  # silent
        reading = await asyncio.wait_for(keeper.read(), 60)
        assert reading["gauges"]["0"] == {"rank_up/target/0": 0}
        await keeper.report(
            {**told, "source": "y", "number": 1, "round": 2, "gauges": {"running": 5}}
        )  # the one that replaces it
        assert (await keeper.read())["gauges"]["0"] == {"running": 5}
        clock.now += 61
        assert (await keeper.read())["gauges"] == {}

    asyncio.run(scenario())


def test_books_take_a_report_once_and_join_copies():
    books, other = Books(), Books()
    for number in (1, 1, 2):
        books.take("x", "0", number, {"a": 2}, FACTS)
    other.join(books.state())
    other.take("y", "1", 1, {"a": 1}, FACTS)
    other.take("x", "0", 2, {"a": 2}, FACTS)
    other.join(books.state())
    assert other.totals == {"0": {"a": 4}, "1": {"a": 1}}
    assert (books.version, other.version) == (2, 3)


@given(st.lists(st.floats(0.001, 50), max_size=30))
def test_ray_is_told_the_same_buckets_and_sum(values):
    bounds = (0.1, 1.0, 10.0)
    ledger = [0, 0, 0, 0]
    for value in values:
        ledger[sum(value > bound for bound in bounds)] += 1
    chosen = values_in(bounds, ledger, sum(values))
    assert sum(value * count for value, count in zip(chosen, ledger, strict=True)) == pytest.approx(
        sum(values), rel=1e-3, abs=1e-3
    )
    for low, value, high in zip((0, *bounds), chosen, (*bounds, float("inf")), strict=True):
        assert low < value <= high


@pytest.mark.parametrize("lost", ["no keeper", "not settled"])
def test_what_a_redeploy_takes_away_is_told_to_the_new_books(lost):
    """The unit and the bookkeeper go at once: the one tells until its report is taken, the other until its successor has its books."""

    async def scenario():
        clock, service, unit = await reporting()
        old = service.keeper
        add_up(unit.numbers, {"a": 2.0})
        tries = 0

        async def goes_on():
            nonlocal tries
            tries += 1
            if tries == 2:
                service.keeper = Bookkeeper(lambda: clock.now)
                unit.fails.clear()
                await old.leave(Handle(service, []), goes_on)
            clock.now += 10 if tries > 2 else 0
            return True

        if lost == "no keeper":
            unit.fails[:] = ["before"] * 9
        else:
            service.keeper = Bookkeeper(lambda: clock.now)
        await unit.reporter.leave(goes_on)
        assert service.keeper is not old
        assert tries >= 2
        assert service.keeper._books.totals == {"0": {"a": 3.0}}

    asyncio.run(scenario())


def test_nobody_waits_for_the_successor_of_books_that_are_deleted():
    async def scenario():
        _, service, unit = await reporting()
        asked = []

        async def goes_on():
            asked.append(1)
            return False

        unit.fails[:] = ["before"] * 9
        await unit.reporter.leave(goes_on)
        await service.keeper.leave(Handle(service, ["before"] * 9), goes_on)
        assert len(asked) == 2

    asyncio.run(scenario())
