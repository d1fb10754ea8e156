"""A drafter in a process of its own, lost in every way: killed, hung, slow, restarted; and a target that goes away (case B33).

Nothing here waits for time to pass: a test goes on when an answer, an end of stream or a deadline comes.
"""

import signal

import pytest
import torch

from dflash2_ray.core.draft_port import Close, Commit, Open, Rows, RowSpan, Wanted, propose
from dflash2_ray.runtime.channel import ChannelClosed
from dflash2_ray.runtime.draft_deadline import DraftDeadline
from dflash2_ray.runtime.draft_link import RemoteDraftPort

H, WIDTH, PATIENCE_S = 32, 3, 60.0


def context_rows(name):
    return torch.randn(600, H, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def step(name, first, count, anchor=7):
    """The messages of one target step; the rows of two rejected drafts come with them."""
    committed = context_rows(name)[first : first + count]
    assert committed.shape[0] == count
    rows = torch.cat([committed, torch.full((2, H), 50.0)])
    return [Rows((RowSpan(name, 0, first, count + 2),), rows), Commit(name, 0, first + count, anchor)]


def opened(name):
    return Open(name, 0, 0.0, 0)


def fresh(drafter, name, base_len, anchor=7):
    """What a drafter makes of the committed rows that was never disturbed."""
    context = drafter.new_context()
    context.append(drafter.context_kv(context_rows(name)[:base_len], torch.arange(base_len), base_len))
    return tuple(drafter.draft([anchor], [context], WIDTH, [0.0]).token_ids[0])


def proposed(port, name, base_len, deadline_s=PATIENCE_S):
    proposals = propose(port, [Wanted(name, 0, base_len, WIDTH)], deadline_s)
    return proposals[0].token_ids if proposals else None


def accepted(histograms):
    return sum(count * length for one in histograms.values() for length, count in enumerate(one))


def until(port, condition):
    """Sleep until something that arrives makes the condition true."""
    with port._changed:
        assert port._changed.wait_for(condition, PATIENCE_S)


@pytest.fixture
def new_port():
    ports = []

    def build(**options):
        ports.append(RemoteDraftPort(**options))
        return ports[-1]

    yield build
    for port in ports:
        port.close()


@pytest.mark.parametrize("transport", ["tcp", "unix", "gloo"])
def test_killed_and_replaced(transport, start_drafter, new_port, drafter, tmp_path):
    """Killed while it drafts: the wait ends with the connection, not with the deadline. The next drafter is told of everything,
    in small bits, while the requests go on; then its drafts are those of one that was never disturbed."""
    if transport == "unix":
        doomed, heir = (start_drafter(gated=gated, path=str(tmp_path / f"{gated}.sock")) for gated in (True, False))
    else:
        doomed = start_drafter(gated=True)
        heir = start_drafter()
    port = new_port(transport="gloo" if transport == "gloo" else "socket", replay_bytes=20 * H * 4)
    assert not port.connected
    assert port.suspect is None
    port.send([opened("early"), *step("early", 0, 30)])
    assert proposed(port, "early", 30) is None  # nobody there yet
    port.connect(doomed.address)
    doomed.release(10)
    port.send([opened("a"), opened("b"), *step("a", 0, 50), *step("b", 0, 9)])
    assert proposed(port, "a", 50) == fresh(drafter, "a", 50)
    while port.num_replaying:
        port.ask([])
    assert proposed(port, "early", 30) == fresh(drafter, "early", 30)
    assert proposed(port, "b", 9) == fresh(drafter, "b", 9)

    port.send(step("a", 50, 4, anchor=9))
    for _ in range(10 - 3):
        proposed(port, "b", 9)  # the gate is shut behind these
    wanted = [Wanted("a", 0, 54, WIDTH), Wanted("b", 0, 9, WIDTH)]
    port.ask(wanted)
    doomed.kill()
    assert port.collect(wanted, 10_000.0) == []
    assert not port.connected
    assert port.suspect == "lost"
    assert port.counters()["num_lost"] == 1

    port.send([opened("c"), *step("c", 0, 33), Close("b", 0)])
    port.send(step("a", 54, 1))
    assert proposed(port, "a", 55) is None
    port.connect(heir.address)
    assert (port.connected, port.suspect, port.generation) == (True, None, 2)
    assert port.num_replaying == 3
    port.send([opened("d"), *step("d", 0, 12)])  # begun after it: asked for at once
    assert proposed(port, "d", 12) == fresh(drafter, "d", 12)
    length, waited = 55, 0
    while (got := proposed(port, "a", length)) is None:
        port.send(step("a", length, 3, anchor=length % 60))
        length += 3
        waited += 1
        assert proposed(port, "d", 12) == fresh(
            drafter, "d", 12
        )  # a target's steps take their time: it has read what was sent
    assert waited > 0  # it came in bits
    assert got == fresh(drafter, "a", length, anchor=(length - 3) % 60)
    while port.num_replaying:
        port.ask([])
    assert proposed(port, "c", 33) == fresh(drafter, "c", 33)
    assert proposed(port, "early", 30) == fresh(drafter, "early", 30)
    assert proposed(port, "b", 9) is None
    for _ in range(6):
        port.send(step("a", length, 2))
        length += 2
        assert proposed(port, "a", length) == fresh(drafter, "a", length)
    counters = port.counters()
    assert counters["num_reconnects"] == 1
    assert counters["missing"] > 0
    assert not any(
        counters.get(name) for name in ("missing_rows", "stale_base", "stale_epoch", "too_many_requests", "num_late")
    )


@pytest.mark.parametrize("transport", ["socket", "gloo"])
def test_hung(transport, start_drafter, new_port, drafter):
    """Stopped, it costs one deadline a few times, then nothing; awake again, what it says late is dropped and it is used again."""
    process = start_drafter()
    port = new_port(transport=transport, deadline=DraftDeadline(0.05), hung_after=3, hung_after_s=0.0)
    port.connect(process.address)
    port.send([opened("a"), *step("a", 0, 5)])
    assert proposed(port, "a", 5) == fresh(drafter, "a", 5)
    process.stop()
    length = 5
    for _ in range(3):
        assert port.suspect is None
        port.send(step("a", length, 2))
        length += 2
        assert proposed(port, "a", length, None) is None
    assert port.suspect == "hung"
    assert port.connected
    for _ in range(50):  # the longest deadline means nothing any more: it is not asked, so not waited for
        port.send(step("a", length, 2))
        length += 2
        assert proposed(port, "a", length, 10_000.0) is None
    assert port.counters()["missing"] == 53
    process.signal(signal.SIGCONT)
    until(port, lambda: port.suspect is None)
    port.send(step("a", length, 1))
    assert proposed(port, "a", length + 1) == fresh(drafter, "a", length + 1)
    assert port.counters()["num_late"] <= 3  # the asks that it had not seen yet replaced each other
    assert port.counters()["num_lost"] == 0


def test_closing_beside_a_hung_drafter(start_drafter, new_port):
    """A tensor that nobody takes does not hold the writer's thread back."""
    process = start_drafter()
    port = new_port(transport="gloo", deadline=DraftDeadline(0.02), group_timeout_s=600.0)
    port.connect(process.address)
    port.send([opened("a")])
    process.stop()
    big = torch.zeros(100_000, H)
    port.send([Rows((RowSpan("a", 0, 0, 100_000),), big), Commit("a", 0, 100_000, 1)])
    assert proposed(port, "a", 100_000, None) is None
    thread = port._link.writer._thread
    assert thread.is_alive()
    port.close()
    assert not thread.is_alive()


def test_late_proposals_are_dropped(start_drafter, new_port, drafter):
    process = start_drafter(gated=True)
    port = new_port(deadline=DraftDeadline(0.02))
    port.connect(process.address)
    port.send([opened("a"), *step("a", 0, 5)])
    assert proposed(port, "a", 5, None) is None
    process.release()
    until(port, lambda: port._own["num_late"] == 1)
    port.send(step("a", 5, 2))
    process.release()
    assert proposed(port, "a", 7) == fresh(drafter, "a", 7)


def test_hung_with_a_full_queue_is_given_up(start_drafter, new_port):
    process = start_drafter()
    port = new_port(max_queued_bytes=200_000)
    port.connect(process.address)
    port.send([opened("a")])
    port.counters()
    process.stop()
    length = 0
    while (
        port.connected
    ):  # more than socket buffers and queue hold; a send that blocked would end the test by its timeout
        rows = torch.zeros(256, H)
        port.send([Rows((RowSpan("a", 0, length, 256),), rows), Commit("a", 0, length + 256, 1)])
        length += 256
    assert port.suspect == "lost"
    assert port.counters()["num_overflows"] == 1
    assert proposed(port, "a", length, 10_000.0) is None


def test_slow(start_drafter, new_port, drafter):
    """The first answers are late; their measured time moves the deadline, and later ones are waited for."""
    process = start_drafter(gated=True)
    deadline = DraftDeadline(floor_s=0.01, first_s=0.05)
    port = new_port(deadline=deadline, hung_after=100)
    port.connect(process.address)
    port.send([opened("a"), *step("a", 0, 5)])
    assert proposed(port, "a", 5, None) is None
    process.release()
    until(port, lambda: len(port.timings) == 1)
    assert port.timings[0][:2] == (1, WIDTH)
    assert port.last_latency_s == port.timings[0].seconds >= 0.05
    assert 0 < port.last_transfer_s < port.last_latency_s
    assert deadline.limit_s >= 0.15
    process.release(2)
    assert proposed(port, "a", 5) == fresh(drafter, "a", 5)
    assert port.counters()["num_late"] == 1


def test_target_that_goes_away(start_drafter, new_port, drafter):
    """The server takes the next target, with nothing of the one before."""
    process = start_drafter()
    first, second = new_port(), new_port()
    first.connect(process.address)
    first.send([opened("a"), *step("a", 0, 20)])
    assert proposed(first, "a", 20) == fresh(drafter, "a", 20)
    first.close()
    assert process.next_reason() == "the target went away"
    second.connect(process.address)
    assert proposed(second, "a", 20) is None
    assert second.counters()["unknown_request"] == 1
    second.send([opened("a"), *step("a", 0, 4)])
    assert proposed(second, "a", 4) == fresh(drafter, "a", 4)


def test_connect_where_nobody_is(start_drafter, new_port, drafter):
    """A connection that fails leaves the one in use alone."""
    gone, process = start_drafter(together=2)
    gone.kill()
    port = new_port()
    with pytest.raises(OSError, match=r"."):
        port.connect(gone.address)
    port.connect(process.address)
    port.send([opened("a"), *step("a", 0, 5)])
    with pytest.raises(OSError, match=r"."):
        port.connect(gone.address)
    with pytest.raises(ChannelClosed):
        port.connect(process.address | {"token": "wrong"}, 0.2)
    assert proposed(port, "a", 5) == fresh(drafter, "a", 5)
    assert port.counters()["num_lost"] == port.counters()["num_reconnects"] == 0


def test_token_for_token_as_colocated(start_drafter, new_port):
    """The embedded pair, drafter in its own process: the same tokens and the same histogram as in one process."""
    from dflash2_ray.config import ServiceConfig
    from dflash2_ray.core.messages import RequestSpec
    from dflash2_ray.core.sampling_params import SamplingParams
    from dflash2_ray.runtime.build import build_target_loop

    keys = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "seed": 1,
        "draft_width": "fixed",
    }  # histograms must not follow the load
    process, heir = start_drafter(together=2, embedded=keys)
    loop = build_target_loop(ServiceConfig.from_keys(keys))
    prompts = [tuple((7 * i + j * j) % 200 + 3 for j in range(5 + 9 * i)) for i in range(8)]

    def run(temperature, after=lambda num_steps: None):
        tokens, stats, num_steps = {}, {}, 0
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=48, ignore_eos=True, seed=index)
            loop.add(RequestSpec(f"{temperature}-{index}", prompt, params))
        while loop.has_work:
            num_steps += 1
            after(num_steps)
            for delta in loop.step():
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.stats is not None:
                    stats[delta.request_id] = delta.stats
        return tokens, {name: one["acceptance_histogram"] for name, one in stats.items()}

    colocated = {temperature: run(temperature) for temperature in (0.0, 1.0)}
    loop.draft_port.close()
    port = loop.draft_port = new_port(deadline=DraftDeadline(60.0))
    port.connect(process.address)
    remote = {temperature: run(temperature) for temperature in (0.0, 1.0)}
    assert remote == colocated
    assert (
        loop.pool.cache.num_hit_tokens > 500
    )  # behind the first run all begin with cached pages, and the drafter is told their rows
    assert len(remote[0.0][1]) == 8
    assert accepted(remote[0.0][1]) > 50
    counters = port.counters()
    assert not any(counters.values()), counters

    def disturb(num_steps):
        if num_steps == 10:
            process.kill()
        if num_steps == 20:
            assert port.suspect == "lost"
            port.connect(heir.address)

    tokens, histograms = run(0.0, disturb)
    assert tokens == colocated[0.0][0]
    assert 50 < accepted(histograms) < accepted(colocated[0.0][1])
    assert port.counters()["missing"] > 0
