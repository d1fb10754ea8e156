"""The contract of the draft port with a real tiny drafter: whatever is doubled, late, out of order, lost or stale, a proposal
is the one that a fresh drafter makes of the committed rows alone, or there is none (cases B18, B21, B22, B24).

The suite runs on every transport of the `port` fixture: a new one is one more entry in TRANSPORTS.
"""

import json
import random
import tempfile
import threading

import pytest
import torch
from safetensors.torch import save_file

from dflash2_ray.core.draft_port import Close, Commit, Open, Rows, RowSpan, Wanted, propose
from dflash2_ray.models.dflash2 import load_drafter
from dflash2_ray.models.drafter_checkpoint import expected_shapes
from dflash2_ray.models.drafter_config import read_drafter_config
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.runtime.draft_deadline import DraftDeadline
from dflash2_ray.runtime.draft_link import RemoteDraftPort
from dflash2_ray.runtime.drafter_runner import ColocatedDraftPort, DrafterRunner
from dflash2_ray.runtime.drafter_server import DrafterServer

V, H, WIDTH = 61, 32, 3
CONFIG = {
    "architectures": ["DFlash2DraftModel"], "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": V, "max_position_embeddings": 1024,
    "rope_theta": 1000.0, "sliding_window": 6, "dflash_config": {
        "block_size": 4, "mask_token_id": 60, "target_layer_ids": [1], "conv_kernel_size": 2, "conv_group_size": 8,
        "selector_rank": 4, "selector_top_k": 4,
    },
}  # fmt: skip


class ServedPort(RemoteDraftPort):
    """A port with its drafter server in a thread of this process; both go with `close`."""

    def __init__(self, server, *, connects=True, **options):
        super().__init__(
            deadline=DraftDeadline(60.0), **options
        )  # what is left out is left out for a reason, never for lateness
        self.server = server
        self.thread = threading.Thread(target=server.serve, daemon=True)
        self.thread.start()
        if connects:
            self.connect(server.address)

    def close(self):
        super().close()
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


def served(transport="socket", unix=False):
    def build(drafter, limit):
        folder = tempfile.mkdtemp(prefix="draft") if unix else None
        path = f"{folder}/drafter.sock" if folder else None
        return ServedPort(
            DrafterServer(DrafterRunner(drafter, max_num_requests=limit), "secret", path=path), transport=transport
        )

    return build


TRANSPORTS = {
    "colocated": lambda drafter, limit: ColocatedDraftPort(DrafterRunner(drafter, max_num_requests=limit)),
    "tcp": served(),
    "unix": served(unix=True),
    "gloo": served("gloo"),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["full", "mixed"])
def drafter(request, tmp_path_factory):
    kinds = ["full_attention", "full_attention" if request.param == "full" else "sliding_attention"]
    return build_drafter(tmp_path_factory.mktemp("drafter"), kinds)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A drafter that looks no further back than its window."""
    return build_drafter(tmp_path_factory.mktemp("drafter"), ["sliding_attention"] * 2)


def build_drafter(folder, kinds):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"layer_types": kinds, "is_causal": False}))
    config = read_drafter_config(folder)
    generator = torch.Generator().manual_seed(4)
    state = {}
    for name, shape in expected_shapes(config).items():
        scale = 1.0 if "codebook" in name else shape[-1] ** -0.5
        state[name] = torch.randn(shape, generator=generator) * scale + name.endswith("norm.weight")
    save_file(state, folder / "model.safetensors")
    embedding, head = torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)
    share = TargetShare(embedding, lambda hidden: hidden @ head.T, head, V, H, 4)
    return load_drafter(folder, config, share, dtype="float32", device="cpu")


@pytest.fixture(params=TRANSPORTS)
def port(request, drafter):
    """`port(limit)` → an open port on the tiny drafter; closed behind the test."""
    opened = []

    def build(limit=32):
        opened.append(TRANSPORTS[request.param](drafter, limit))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


def context_rows(name, epoch=0):
    """The rows that request `name` would send, by position: a fixed random matrix; another epoch, another text."""
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(name)) + 1000 * epoch
    return torch.randn(600, H, generator=torch.Generator().manual_seed(seed))


def rows(*spans, void=False):
    """Rows of several requests in one message: (name, epoch, first, count). void: rows of rejected drafts."""
    pieces = [context_rows(name, epoch)[first : first + count] for name, epoch, first, count in spans]
    payload = torch.cat(pieces)
    return Rows(tuple(RowSpan(*span) for span in spans), payload + 50 if void else payload)


def step(name, first, count, anchor=7, epoch=0):
    """The messages of one target step."""
    return [rows((name, epoch, first, count)), Commit(name, epoch, first + count, anchor)]


def fresh(drafter, name, base_len, anchor=7, epoch=0, width=WIDTH):
    """What a new drafter makes of the committed rows alone, greedily."""
    context = drafter.new_context()
    context.append(drafter.context_kv(context_rows(name, epoch)[:base_len], torch.arange(base_len), base_len))
    return tuple(drafter.draft([anchor], [context], width, [0.0]).token_ids[0])


def proposed(port, name, base_len, epoch=0, width=WIDTH):
    """The token ids of the one proposal, None where there is none."""
    proposals = propose(port, [Wanted(name, epoch, base_len, width)])
    if not proposals:
        return None
    assert len(proposals) == 1
    assert (proposals[0].request_id, proposals[0].epoch, proposals[0].base_len) == (name, epoch, base_len)
    assert len(proposals[0].token_ids) == width
    return proposals[0].token_ids


def opened(name, epoch=0, temperature=0.0, seed=0):
    return Open(name, epoch, temperature, seed)


def test_the_references_differ(drafter):
    """The comparisons below mean something: other rows, lengths and anchors give other drafts."""
    drafts = {fresh(drafter, name, base_len, anchor) for name in "abc" for base_len in (5, 6, 7) for anchor in (7, 8)}
    assert len(drafts) > 12


# ---- in order ---------------------------------------------------------------------------------------------------------


def test_in_order(port, drafter):
    one = port()
    one.send([opened("a"), *step("a", 0, 5)])
    assert proposed(one, "a", 5) == fresh(drafter, "a", 5)
    one.send(step("a", 5, 1, anchor=9))
    assert proposed(one, "a", 6) == fresh(drafter, "a", 6, anchor=9)
    assert proposed(one, "a", 6) == fresh(drafter, "a", 6, anchor=9)  # asking twice changes nothing
    one.send(step("a", 6, 4, anchor=8))
    one.send(step("a", 10, 2, anchor=3))  # two steps without a draft in between
    assert proposed(one, "a", 12) == fresh(drafter, "a", 12, anchor=3)
    assert not any(one.counters().values())


def test_chunked_prefill(port, drafter):
    """No anchor in the middle of a prefill, so no proposal; the last chunk brings one."""
    one = port()
    one.send([opened("a"), *step("a", 0, 8, anchor=None)])
    assert proposed(one, "a", 8) is None
    one.send(step("a", 8, 8, anchor=None))
    one.send(step("a", 16, 3))
    assert proposed(one, "a", 19) == fresh(drafter, "a", 19)


def test_several_requests_in_one_message(port, drafter):
    one = port()
    one.send([opened("a"), opened("b"), opened("c"), rows(("a", 0, 0, 5), ("b", 0, 0, 1), ("c", 0, 0, 9)),
              Commit("c", 0, 9, 7), Commit("a", 0, 5, 7), Commit("b", 0, 1, 8)])  # fmt: skip
    got = {
        p.request_id: p.token_ids
        for p in propose(one, [Wanted("b", 0, 1, 3), Wanted("c", 0, 9, 3), Wanted("a", 0, 5, 3)])
    }
    assert got == {"a": fresh(drafter, "a", 5), "b": fresh(drafter, "b", 1, 8), "c": fresh(drafter, "c", 9)}


def test_b18_different_widths_in_one_call(port, drafter):
    one = port()
    one.send([opened("a"), opened("b"), opened("c"), *step("a", 0, 5), *step("b", 0, 12), *step("c", 0, 2)])
    wanted = [Wanted("a", 0, 5, 1), Wanted("b", 0, 12, 3), Wanted("c", 0, 2, 1)]
    got = {p.request_id: p.token_ids for p in propose(one, wanted)}
    assert got == {
        "a": fresh(drafter, "a", 5, width=1),
        "b": fresh(drafter, "b", 12),
        "c": fresh(drafter, "c", 2, width=1),
    }


def test_long_generation(port, drafter):
    """Contexts grow past every first allocation, drafts in between."""
    one = port()
    one.send([opened("a"), *step("a", 0, 20)])
    length = 20
    for count in [1, 4, 2, 3] * 50:
        assert proposed(one, "a", length) is not None
        one.send(step("a", length, count))
        length += count
    assert length == 520
    assert proposed(one, "a", length) == fresh(drafter, "a", length)


@pytest.mark.parametrize("copies", [1, 4, 8, 16])
def test_b22_copies_are_equal(port, drafter, copies):
    """Every copy of a request drafts the same as a single run, step after step."""
    one = port()
    text = context_rows("a")
    names = [f"copy {i}" for i in range(copies)]
    one.send([opened(name) for name in names])
    length = 0
    for count in (9, 1, 4, 2, 3):
        spans = tuple(RowSpan(name, 0, length, count) for name in names)
        payload = text[length : length + count].repeat(copies, 1)
        length += count
        one.send([Rows(spans, payload), *[Commit(name, 0, length, 7) for name in names]])
        got = [p.token_ids for p in propose(one, [Wanted(name, 0, length, WIDTH) for name in names])]
        assert got == [fresh(drafter, "a", length)] * copies


# ---- doubled, late, out of order --------------------------------------------------------------------------------------


def test_every_message_doubled(port, drafter):
    one = port()
    for first, count in ((0, 5), (5, 2), (7, 1)):
        messages = step("a", first, count)
        if first == 0:
            messages.insert(0, opened("a"))
        one.send([message for message in messages for _ in range(2)])
        assert proposed(one, "a", first + count) == fresh(drafter, "a", first + count)
    counters = one.counters()
    assert counters["duplicate_open"] == 1
    assert counters["stale_base"] == 3
    assert not counters.get("missing_rows")


def test_step_sent_again_after_a_rejection(port, drafter):
    """The rows of rejected drafts stay void when the step that brought them arrives twice."""
    one = port()
    one.send([opened("a"), *step("a", 0, 5)])
    void = rows(("a", 0, 6, 3), void=True).rows
    verified = Rows((RowSpan("a", 0, 5, 4),), torch.cat([context_rows("a")[5:6], void]))  # anchor kept, three rejected
    for _ in range(2):
        one.send([verified, Commit("a", 0, 6, 9)])
    assert proposed(one, "a", 6) == fresh(drafter, "a", 6, anchor=9)
    one.send(step("a", 6, 4, anchor=3))
    assert proposed(one, "a", 10) == fresh(drafter, "a", 10, anchor=3)


def test_late_open_does_not_start_over(port, drafter):
    one = port()
    one.send([opened("a"), *step("a", 0, 5)])
    one.send([opened("a")])
    one.send(step("a", 5, 2))
    assert proposed(one, "a", 7) == fresh(drafter, "a", 7)


def test_reordered_rows(port, drafter):
    one = port()
    one.send([opened("a"), rows(("a", 0, 6, 2)), rows(("a", 0, 0, 4)), rows(("a", 0, 4, 2)), Commit("a", 0, 8, 7)])
    assert proposed(one, "a", 8) == fresh(drafter, "a", 8)
    one.send([rows(("a", 0, 8, 3)), rows(("a", 0, 9, 4)), Commit("a", 0, 13, 7)])  # overlapping ones are one run
    assert proposed(one, "a", 13) == fresh(drafter, "a", 13)
    assert not one.counters().get("missing_rows")


def test_stale_commit(port, drafter):
    one = port()
    one.send([opened("a"), *step("a", 0, 5), *step("a", 5, 3, anchor=9)])
    one.send([Commit("a", 0, 5, 7)])  # long overtaken: neither length nor anchor goes back
    assert one.counters()["stale_base"] == 1
    assert proposed(one, "a", 8) == fresh(drafter, "a", 8, anchor=9)
    assert proposed(one, "a", 5) is None
    one.send([rows(("a", 0, 8, 2)), Commit("a", 0, 8, 3), Commit("a", 0, 10, 4)])
    assert proposed(one, "a", 10) == fresh(drafter, "a", 10, anchor=4)


def test_rows_beyond_the_committed_length_are_void(port, drafter):
    one = port()
    one.send([opened("a"), rows(("a", 0, 0, 5)), rows(("a", 0, 5, 4), void=True), Commit("a", 0, 5, 7)])
    assert proposed(one, "a", 5) == fresh(drafter, "a", 5)
    one.send(step("a", 5, 4, anchor=9))
    assert proposed(one, "a", 9) == fresh(drafter, "a", 9, anchor=9)
    one.send([rows(("a", 0, 9, 4)), Commit("a", 0, 11, 7)])
    one.send([Commit("a", 0, 13, 7)])  # its rows were voided by the commit before: a gap
    assert proposed(one, "a", 13) is None
    assert one.counters()["missing_rows"] > 0


# ---- lost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lossy",
    [
        [rows(("a", 0, 6, 2)), Commit("a", 0, 8, 7)],
        [rows(("a", 0, 5, 1)), rows(("a", 0, 7, 1)), Commit("a", 0, 8, 7)],
        [rows(("a", 0, 5, 2)), Commit("a", 0, 8, 7)],
        [Commit("a", 0, 8, 7)],
    ],
    ids=["first row", "middle row", "last row", "all rows"],
)
def test_a_gap_is_never_drafted_for(port, drafter, lossy):
    one = port()
    one.send([opened("a"), opened("b"), *step("a", 0, 5), *step("b", 0, 5)])
    one.send(lossy)
    assert proposed(one, "a", 8) is None
    assert proposed(one, "a", 5) is None
    before = one.counters()["missing_rows"]
    assert before > 0
    one.send(step("a", 8, 3))  # whole again from here on, but the gap stays
    assert proposed(one, "a", 11) is None
    assert one.counters()["missing_rows"] > before
    assert proposed(one, "b", 5) == fresh(drafter, "b", 5)  # neighbours do not notice
    one.send([opened("a", 1), *step("a", 0, 6, epoch=1)])  # begun again, it is whole
    assert proposed(one, "a", 6, epoch=1) == fresh(drafter, "a", 6, epoch=1)


def test_lost_open(port, drafter):
    one = port()
    one.send([*step("a", 0, 5), Close("a", 0)])
    assert proposed(one, "a", 5) is None
    assert one.counters()["unknown_request"] >= 3
    one.send([opened("a"), *step("a", 0, 5)])
    assert proposed(one, "a", 5) == fresh(drafter, "a", 5)


@pytest.mark.parametrize(
    "wanted", [Wanted("a", 0, 4, 3), Wanted("a", 0, 6, 3), Wanted("a", 1, 5, 3), Wanted("x", 0, 5, 3)]
)
def test_only_the_exact_state_is_drafted_for(port, drafter, wanted):
    one = port()
    one.send([opened("a"), opened("b"), *step("a", 0, 5), *step("b", 0, 5)])
    proposals = propose(one, [wanted, Wanted("b", 0, 5, 3)])
    assert [p.token_ids for p in proposals] == [fresh(drafter, "b", 5)]
    assert sum(one.counters().values()) == 1


# ---- epochs -----------------------------------------------------------------------------------------------------------


def test_stale_epochs(port, drafter):
    one = port()
    one.send([opened("a"), *step("a", 0, 9), opened("a", 2), *step("a", 0, 5, epoch=2)])
    one.send([*step("a", 5, 2), opened("a", 1), *step("a", 0, 3, epoch=1), Close("a", 1), Close("a", 0)])
    assert one.counters()["stale_epoch"] == 7
    assert proposed(one, "a", 5, epoch=2) == fresh(drafter, "a", 5, epoch=2)
    assert proposed(one, "a", 9) is None
    one.send(step("a", 5, 1, epoch=2))
    assert proposed(one, "a", 6, epoch=2) == fresh(drafter, "a", 6, epoch=2)


def test_messages_of_a_later_epoch_do_not_leak_into_the_current_one(port, drafter):
    one = port()
    one.send([opened("a"), *step("a", 0, 5), *step("a", 5, 2, epoch=1)])
    assert proposed(one, "a", 5) == fresh(drafter, "a", 5)
    assert proposed(one, "a", 7, epoch=1) is None


def test_close(port, drafter):
    one = port()
    one.send([opened("a", 1), *step("a", 0, 5, epoch=1), Close("a", 0)])  # an older life's close
    assert proposed(one, "a", 5, epoch=1) == fresh(drafter, "a", 5, epoch=1)
    one.send([Close("a", 1)])
    assert proposed(one, "a", 5, epoch=1) is None
    one.send([Close("a", 1), *step("a", 5, 2, epoch=1)])
    assert proposed(one, "a", 7, epoch=1) is None
    assert one.counters()["unknown_request"] >= 4


def test_b21_reopened_requests_start_clean(port, drafter):
    """One slot: a long prompt, a short one, the long one again; each drafts as in a fresh process."""
    one = port(1)
    for name, length in (("long", 40), ("short", 5), ("long", 40)):
        one.send([opened(name), *step(name, 0, length)])
        assert proposed(one, name, length) == fresh(drafter, name, length)
        one.send(step(name, length, 3, anchor=9))
        assert proposed(one, name, length + 3) == fresh(drafter, name, length + 3, anchor=9)
        one.send([Close(name, 0)])
    assert not any(one.counters().values())


def test_b24_a_higher_epoch_keeps_nothing(port, drafter):
    """Begun again in the middle (a preemption), with pending rows left over, shorter and with other rows, then longer."""
    one = port()
    one.send([opened("a"), *step("a", 0, 40), rows(("a", 0, 40, 4))])
    one.send([opened("a", 1), Commit("a", 1, 3, 7)])  # the rows of epoch 0 are not its own
    assert proposed(one, "a", 3, epoch=1) is None
    assert one.counters()["missing_rows"] > 0
    one.send([opened("a", 2), *step("a", 0, 5, epoch=2)])
    assert proposed(one, "a", 5, epoch=2) == fresh(drafter, "a", 5, epoch=2)
    for base_len in range(5, 45):
        one.send(step("a", base_len, 1, epoch=2))
        assert proposed(one, "a", base_len + 1, epoch=2) == fresh(drafter, "a", base_len + 1, epoch=2)


# ---- limits and noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_windowed_drafter_needs_its_last_window_only(transport, windowed):
    """A request that starts behind cached pages: rows from `first_position` on, and every proposal is that of a drafter that saw all."""
    assert windowed.config.context_window == 5
    port = TRANSPORTS[transport](windowed, 4)
    try:
        for name, first in (("a", 40), ("b", 0)):
            port.send(
                [Open(name, 0, 0.0, 0, first_position=first), rows((name, 0, first, 45 - first)), *step(name, 45, 3)]
            )
            length = 48
            assert proposed(port, name, length) == fresh(windowed, name, length)
            for count in (1, 4, 2, 9):
                port.send(step(name, length, count))
                length += count
                assert proposed(port, name, length) == fresh(windowed, name, length)
        port.send([Open("c", 0, 0.0, 0, first_position=40), *step("c", 41, 3)])  # a hole is never drafted from
        assert proposed(port, "c", 44) is None
    finally:
        port.close()


def test_a_drafter_that_comes_later_is_told_of_the_last_window_only(windowed):
    port = ServedPort(
        DrafterServer(DrafterRunner(windowed, max_num_requests=4), "secret"), connects=False, replay_bytes=4 * H * 4
    )
    try:
        port.send([Open("a", 0, 0.0, 0, first_position=40), rows(("a", 0, 40, 5)), *step("a", 45, 13)])
        port.send([Open("b", 0, 0.0, 0, first_position=40)])
        port.connect(port.server.address)
        while port.num_replaying:
            port.ask([])
        assert proposed(port, "a", 58) == fresh(windowed, "a", 58)
        port.send([rows(("b", 0, 40, 5)), *step("b", 45, 3)])
        assert proposed(port, "b", 48) == fresh(windowed, "b", 48)
    finally:
        port.close()


def test_too_many_requests(port, drafter):
    one = port(2)
    for name in "abc":
        one.send([opened(name), *step(name, 0, 5)])
    assert one.counters()["too_many_requests"] == 1
    assert [proposed(one, name, 5) for name in "abc"] == [fresh(drafter, "a", 5), fresh(drafter, "b", 5), None]
    one.send([opened("a", 1), *step("a", 0, 4, epoch=1)])  # one that is known may always begin again
    assert proposed(one, "a", 4, epoch=1) == fresh(drafter, "a", 4, epoch=1)
    one.send([Close("b", 0), opened("c", 1), *step("c", 0, 5, epoch=1)])
    assert proposed(one, "c", 5, epoch=1) == fresh(drafter, "c", 5, epoch=1)
    assert one.counters()["too_many_requests"] == 1


def test_sampled_requests(port, drafter):
    """Their proposals carry the rows that they were drawn from, and depend on seed and position, not on company."""
    one = port()
    one.send(
        [
            opened("a", temperature=1.5, seed=1),
            opened("b"),
            opened("c", temperature=1.5, seed=2),
            opened("d", temperature=1.5, seed=1),
        ]
    )
    one.send([message for name in "abc" for message in step(name, 0, 5)])
    one.send([Rows((RowSpan("d", 0, 0, 5),), context_rows("a")[:5]), Commit("d", 0, 5, 7)])
    together = {p.request_id: p for p in propose(one, [Wanted(name, 0, 5, WIDTH) for name in "abcd"])}
    assert together["b"].candidate_ids is None
    assert together["b"].candidate_probs is None
    assert together["b"].token_ids == fresh(drafter, "b", 5)
    for name in "acd":
        proposal, (alone,) = together[name], propose(one, [Wanted(name, 0, 5, WIDTH)])
        assert proposal.token_ids == alone.token_ids
        torch.testing.assert_close(
            torch.as_tensor(proposal.candidate_probs), torch.as_tensor(alone.candidate_probs), rtol=0, atol=1e-5
        )
        probs, ids = torch.as_tensor(proposal.candidate_probs), torch.as_tensor(proposal.candidate_ids)
        assert probs.shape == ids.shape == (WIDTH, 4)
        torch.testing.assert_close(probs.sum(-1), torch.ones(WIDTH))
        drawn = torch.tensor(proposal.token_ids)[:, None] == ids
        assert (drawn.sum(-1) == 1).all()
        assert (probs[drawn] > 0).all()
    assert together["a"].token_ids == together["d"].token_ids
    streams = {name: [] for name in "acd"}
    for length in range(5, 25):
        for name, text in (("a", "a"), ("c", "a"), ("d", "a")):
            one.send(
                [
                    Rows((RowSpan(name, 0, length, 1),), context_rows(text)[length : length + 1]),
                    Commit(name, 0, length + 1, 7),
                ]
            )
            streams[name].append(proposed(one, name, length + 1))
    assert streams["a"] == streams["d"] != streams["c"]


def test_closed_port_keeps_nothing(port):
    one = port(1)
    one.send([opened("a"), *step("a", 0, 5)])
    one.close()
    assert propose(one, [Wanted("a", 0, 5, WIDTH)]) == []


@pytest.mark.parametrize("seed", range(4))
def test_random_disorder(port, drafter, seed):
    """Steps of four requests with random doubles, swaps, rejected rows, stale leftovers and new beginnings."""
    rng = random.Random(seed)
    one = port()
    epochs, lengths, past = dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0), []
    one.send([opened(name) for name in "abcd"])
    checked = 0
    for _ in range(60):
        name = rng.choice("abcd")
        if rng.random() < 0.1:
            epochs[name] += 1
            lengths[name] = 0
            one.send([opened(name, epochs[name])])
        epoch, first, count, anchor = epochs[name], lengths[name], rng.randint(1, 7), rng.randrange(V)
        cut = rng.randint(0, count)
        parts = [rows((name, epoch, first + at, size)) for at, size in ((0, cut), (cut, count - cut)) if size]
        if rng.random() < 0.5:
            parts.append(rows((name, epoch, first + count, 3), void=True))
        parts += rng.sample(parts, rng.randint(0, len(parts)))
        rng.shuffle(parts)
        lengths[name] += count
        messages = [*parts, Commit(name, epoch, lengths[name], anchor)]
        one.send(messages)
        past.append(messages)
        assert proposed(one, name, lengths[name], epoch) == fresh(drafter, name, lengths[name], anchor, epoch)
        checked += 1
        if rng.random() < 0.3:
            one.send([message for message in rng.choice(past) if isinstance(message, (Commit, Close))])
    assert checked == 60
    assert not one.counters().get("missing_rows")


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "colocated"])
@pytest.mark.parametrize("seed", range(3))
def test_every_transport_counts_the_same(transport, drafter, seed):
    """Lost, doubled, swapped, stale and later messages at random: the same proposals and the same counters as colocated."""
    ports = [TRANSPORTS[name](drafter, 3) for name in ("colocated", transport)]
    try:
        rng = random.Random(seed)
        epochs, lengths, past = dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0), []
        for _ in range(60):
            name = rng.choice("abcd")
            first, count = lengths[name], rng.randint(1, 5)
            messages = step(name, first, count, rng.randrange(V), epochs[name])
            lengths[name] += count
            if first == 0 or rng.random() < 0.1:
                messages.insert(0, opened(name, epochs[name], temperature=1.0))
            if rng.random() < 0.15:
                messages.append(Close(name, epochs[name]))
                epochs[name] += 1
                lengths[name] = 0
            past.extend(messages)
            messages = [message for message in messages if rng.random() > 0.05] + rng.sample(
                past, rng.randint(0, min(3, len(past)))
            )
            if rng.random() < 0.3:
                rng.shuffle(messages)
            wanted = [Wanted(one, epochs[one], lengths[one], rng.randint(1, WIDTH)) for one in "abcd"]
            seen = []
            for one in ports:
                one.send(messages)
                got = propose(one, wanted)
                seen.append(
                    sorted((p.request_id, p.epoch, p.base_len, p.token_ids, p.candidate_probs.tolist()) for p in got)
                )
            assert seen[0] == seen[1]
        counters = [{name: count for name, count in one.counters().items() if count} for one in ports]
        assert counters[0] == counters[1]
        assert set(counters[0]) >= {"stale_base", "stale_epoch", "unknown_request", "missing_rows", "duplicate_open"}
    finally:
        for one in ports:
            one.close()
