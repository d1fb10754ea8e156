"""The drafter against the official `dflash` package and against small written-out references: hidden states, candidates,
lattice scores, greedy and sampled drafts, over growing contexts (cases B13, B15-B20)."""

import itertools
import json
import math

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Qwen3Config

from dflash2_kernels.selector_walk import DRAW, GREEDY, RACE, selector_walk
from dflash2_ray.models.dflash2 import load_context_projection, load_drafter
from dflash2_ray.models.draft_context import DraftContext, append_all
from dflash2_ray.models.drafter_config import read_drafter_config
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.sampling.noise import Purpose, uniforms
from dflash2_ray.sampling.token_noise import exponentials

V, H, LAYERS, TARGET_LAYERS, MASK = 97, 64, 2, 8, 96
COMMITS = [13, 1, 3, 2, 30, 1, 4]  # prefill, then what the steps commit


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_share(vocab=V, padding=0, seed=1):
    """A target's ends; rows that pad them are huge, so that reading one shows."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, H, generator=generator)
    weight = torch.randn(vocab, H, generator=generator) * 0.4
    pad = torch.full((padding, H), 1e6)
    return TargetShare(
        embedding=torch.cat([embedding, pad]),
        head=lambda hidden: hidden @ weight.T,
        head_weight=torch.cat([weight, pad]),
        vocab_size=vocab,
        hidden_size=H,
        num_layers=TARGET_LAYERS,
    )


def save_drafter(folder, *, dflash2=True, taps=(1, 4), window=None, kinds=None, is_causal=None, group=16, block=5, rank=8,
                 top_k=4, vocab=V, method=None, edit=None, **keys):  # fmt: skip
    """A random official drafter, saved; every weight is large enough to matter. `method`: more keys of `dflash_config`."""
    torch.manual_seed(11)
    kinds = kinds or (["full_attention"] * LAYERS if window is None else ["sliding_attention"] * LAYERS)
    dflash = {"block_size": block, "mask_token_id": MASK, "target_layer_ids": list(taps)}
    if dflash2:
        dflash |= {"conv_kernel_size": 2, "conv_group_size": group, "selector_rank": rank, "selector_top_k": top_k}
    dflash |= method or {}
    kind = DFlash2DraftModel if dflash2 else DFlashDraftModel
    config = Qwen3Config(**({
        "hidden_size": H, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": LAYERS, "vocab_size": vocab, "max_position_embeddings": 512, "rope_theta": 1000.0,
        "layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None, "is_causal": is_causal,
        "num_target_layers": TARGET_LAYERS, "dflash_config": dflash, "architectures": [kind.__name__],
    } | keys))  # fmt: skip
    model = kind(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "codebook" in name:
                value.normal_(0, 1)
            elif "base_kernel" in name:
                value.normal_(0, 0.4)
            elif value.dim() == 1:
                value.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
            else:
                value.normal_(0, value.shape[1] ** -0.5)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if edit:
        edit(state)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    raw = config.to_dict() | {"architectures": [kind.__name__], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    return model


class Ours:
    """Our drafter and projection, from a folder, in fp32."""

    def __init__(self, folder, share=None):
        self.config = read_drafter_config(folder)
        self.share = share or make_share()
        self.drafter = load_drafter(folder, self.config, self.share, dtype="float32", device="cpu")
        self.project = load_context_projection(folder, self.config, "float32", "cpu")

    def commit(self, context, features):
        start, count = context.num_committed, features.shape[0]
        rows = self.project(features)
        context.append(self.drafter.context_kv(rows, torch.arange(start, start + count), start + count))

    def context(self, features, *cuts):
        context = self.drafter.new_context()
        for first, last in itertools.pairwise([0, *cuts, features.shape[0]]):
            self.commit(context, features[first:last])
        return context

    def lattice(self, anchors, contexts, width):
        hidden = self.drafter.block_hidden(anchors, contexts, width)
        unary, ids = self.drafter.candidates(hidden)
        return self.drafter.candidate_selector.lattice(hidden, unary, ids, torch.tensor(anchors)), ids


def features_of(count, taps=2, seed=5):
    return torch.randn(count, taps * H, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def official_block(model, cache, features, start, anchor, width, share):
    """One step of `dflash_generate`'s drafting: hidden states of rows 1 … width."""
    ids = torch.tensor([[anchor] + [MASK] * width])
    scale = model.config.dflash_config.get("input_embedding_scale", 1.0)
    hidden = model(
        target_hidden=features[None],
        noise_embedding=F.embedding(ids, share.embedding) * scale,
        position_ids=torch.arange(start - features.shape[0], start + width + 1)[None],
        past_key_values=cache,
        use_cache=True,
    )[:, -width:]
    _crop_to(cache, start)
    return hidden


PRODUCT = [
    {"is_causal": causal, "window": window, "taps": [(1,), (4, 1), (0, 2, 7)][(a + b) % 3], "dflash2": dflash2,
     "group": [8, 16, 32][(a + 2 * b) % 3], "block": [3, 5, 8][(2 * a + b + dflash2) % 3],
     "kinds": ["sliding_attention", "full_attention"] if window == 20 else None}
    for (a, causal), (b, window), dflash2 in itertools.product(
        enumerate([None, True, False]), enumerate([None, 4, 20]), [True, False])
]  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128}
EXTRAS = [
    {"rope_parameters": YARN},
    {"attention_bias": True, "window": 6},
    {"method": {"input_embedding_scale": 1.7, "output_multiplier": 0.3, "final_logit_softcapping": 2.0}},
    {"num_key_value_heads": 4, "rank": 16, "top_k": 7},
    {"method": {"conv_kernel_size": 3}},
]


def _label(options):
    return "-".join(f"{key}={value}" for key, value in options.items() if key != "kinds").replace(" ", "")


@pytest.mark.parametrize("options", PRODUCT + EXTRAS, ids=_label)
def test_equals_the_official_drafter(tmp_path, options):
    official, share = save_drafter(tmp_path, **options), make_share()
    ours = Ours(tmp_path, share)
    assert ours.drafter.config.is_dflash2 is options.get("dflash2", True)
    taps, width = len(ours.config.taps), ours.config.draft_block_size - 1
    features = features_of(sum(COMMITS), taps)
    cache, context, start = _make_cache(official.config), ours.drafter.new_context(), 0
    for step, count in enumerate(COMMITS):
        new = features[start : start + count]
        start += count
        anchor = 3 + 7 * step
        expected = official_block(official, cache, new, start, anchor, width, share)
        ours.commit(context, new)
        got = ours.drafter.block_hidden([anchor], [context], width)
        assert expected.std() > 0.1
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        check_choice(official, ours, context, expected, anchor, width)


@torch.no_grad()
def check_choice(official, ours, context, hidden, anchor, width):
    """Candidates, lattice rows of the official path's predecessors, and greedy tokens."""
    share = ours.share
    logits = official.compute_logits(hidden, share.head)
    greedy = ours.drafter.draft([anchor], [context], width, [0.0])
    assert greedy.candidate_probs is None
    if not ours.config.is_dflash2:
        assert greedy.token_ids == logits.argmax(-1).tolist()
        return
    path, candidates, _ = official.propose(hidden, torch.tensor([anchor]), share.head, 0.0)
    assert greedy.token_ids == path.tolist()
    torch.manual_seed(anchor)
    temperature = 0.8
    path, candidates, q_rows = official.propose(hidden, torch.tensor([anchor]), share.head, temperature)
    scores, ids = ours.lattice([anchor], [context], width)
    before = 0
    for slot in range(width):
        order = candidates[0, slot].argsort()
        assert ids[0, slot].tolist() == candidates[0, slot, order].tolist()
        row = scores[0, slot, before]
        torch.testing.assert_close((row / temperature).softmax(-1), q_rows[0, slot, order], rtol=0, atol=1e-4)
        predecessor = anchor if slot == 0 else int(path[0, slot - 1])
        selector = official.candidate_selector
        gate = selector.predecessor_codebook.weight[predecessor] * selector.hidden_projection(hidden[0, slot])
        plain = logits[0, slot, ids[0, slot]] + selector.successor_codebook.weight[ids[0, slot]] @ gate
        torch.testing.assert_close(row, plain, rtol=1e-4, atol=1e-4)
        before = ids[0, slot].tolist().index(int(path[0, slot]))


# ---- requests and contexts --------------------------------------------------------------------------------------------

ATTENTION = [{}, {"window": 6}, {"window": 20, "is_causal": False, "kinds": ["sliding_attention", "full_attention"]}]


@pytest.mark.parametrize("options", ATTENTION, ids=["full", "window 6", "mixed"])
@pytest.mark.parametrize("dflash2", [True, False])
def test_b18_b19_batch_equals_each_alone(tmp_path, options, dflash2):
    save_drafter(tmp_path, dflash2=dflash2, **options)
    ours = Ours(tmp_path)
    lengths, anchors = [3, 40, 17, 1], [5, 6, 7, 8]
    contexts = [
        ours.context(features_of(n, seed=n), (n + 1) // 2) if n > 1 else ours.context(features_of(n, seed=n))
        for n in lengths
    ]
    together = ours.drafter.block_hidden(anchors, contexts, 4)
    drafts = ours.drafter.draft(anchors, contexts, 4, [0.0] * 4)
    for r, context in enumerate(contexts):
        alone = ours.drafter.block_hidden([anchors[r]], [context], 4)
        torch.testing.assert_close(together[r : r + 1], alone, rtol=0, atol=1e-5)
        assert drafts.token_ids[r] == ours.drafter.draft([anchors[r]], [context], 4, [0.0]).token_ids[0]
    # B19: another neighbour, other tokens: the first request is unchanged to the bit
    contexts[1] = ours.context(features_of(40, seed=99))
    other = ours.drafter.block_hidden([5, 60, 7, 8], contexts, 4)
    assert torch.equal(other[[0, 2, 3]], together[[0, 2, 3]])
    assert not torch.allclose(other[1], together[1], atol=1e-3)


@pytest.mark.parametrize(("causal", "sees"), [(False, True), (True, False)])
def test_b19_later_slots_are_seen_unless_causal(tmp_path, causal, sees):
    save_drafter(tmp_path, is_causal=causal)
    ours = Ours(tmp_path)
    context = ours.context(features_of(9))
    short, long = (ours.drafter.block_hidden([5], [context], width)[0] for width in (1, 4))
    assert torch.allclose(short[0], long[0], atol=1e-5) is not sees


def test_incremental_context_equals_one_pass(tmp_path):
    """Scratch rows of drafts in between are overwritten, and how rows arrive makes no difference."""
    for name, options in enumerate(ATTENTION):
        save_drafter(tmp_path / str(name), **options)
        ours = Ours(tmp_path / str(name))
        features = features_of(60)
        whole = ours.drafter.block_hidden([5], [ours.context(features)], 4)
        context = ours.drafter.new_context()
        for first, last in itertools.pairwise([0, 1, 2, 10, 11, 31, 33, 36, 60]):
            ours.commit(context, features[first:last])
            ours.drafter.block_hidden([9], [context], 4)
        torch.testing.assert_close(ours.drafter.block_hidden([5], [context], 4), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "has_effect"), [("sliding_attention", False), ("full_attention", True)])
def test_b20_rows_outside_the_window(tmp_path, kind, has_effect):
    save_drafter(tmp_path, window=8, kinds=[kind] * LAYERS)
    ours = Ours(tmp_path)
    features = features_of(40)
    spoiled = features.clone()
    spoiled[5] += 3
    one, two = (ours.drafter.block_hidden([5], [ours.context(rows, 13)], 4) for rows in (features, spoiled))
    assert torch.equal(one, two) is not has_effect
    # the window's edge: the block's first masked row sees positions 41 - 7 = 34 on, the anchor's row 33 on
    for position, seen in ((32, False), (33, True), (39, True)):
        spoiled = features.clone()
        spoiled[position] += 3
        assert torch.equal(one, ours.drafter.block_hidden([5], [ours.context(spoiled)], 4)) is not (seen or has_effect)


def test_windowed_contexts_keep_only_their_window(tmp_path):
    save_drafter(tmp_path, window=8, kinds=["sliding_attention", "full_attention"])
    ours = Ours(tmp_path)
    features = features_of(900)
    context = ours.context(features)
    assert context.num_kept_rows == {8: 7, None: 900}
    context, most = ours.drafter.new_context(), 0
    for first in range(0, 900, 5):
        ours.commit(context, features[first : first + 5])
        ours.drafter.block_hidden([5], [context], 4)
        most = max(most, context.num_kept_rows[8])
    assert context.num_kept_rows[None] == 900
    assert most <= 8 + 5 + 5 + 128  # window, commit, block, slack


# ---- anchor, candidates, selector -------------------------------------------------------------------------------------


def test_contexts_grow_together_as_each_alone():
    generator = torch.Generator().manual_seed(0)

    def contexts():
        return [DraftContext([None, 5, None], 1, 2, torch.empty(0)) for _ in range(3)]

    together, alone = contexts(), contexts()
    for order in ((0, 1, 2), (2, 0), (1, 1, 0), (0, 0, 2, 2)):  # twice in one call as well
        counts = [int(one) for one in torch.randint(1, 90, (len(order),), generator=generator)]
        rows = torch.randn(sum(counts), 3, 2, 1, 2, generator=generator)
        append_all([together[index] for index in order], rows, counts)
        for index, own in zip(order, rows.split(counts), strict=True):
            alone[index].append(own)
        for one, other in zip(together, alone, strict=True):
            assert one.num_committed == other.num_committed
            for layer in range(3):
                assert all(
                    torch.equal(a, b) for a, b in zip(one.view(layer, 0)[:2], other.view(layer, 0)[:2], strict=True)
                )


def test_b13_block_is_anchor_then_masks(tmp_path, monkeypatch):
    save_drafter(tmp_path, method={"mask_token_id": 58})
    ours = Ours(tmp_path)
    seen = []
    embedding = F.embedding
    monkeypatch.setattr(F, "embedding", lambda ids, table: seen.append(ids.clone()) or embedding(ids, table))
    positions = []
    rows = ours.drafter._rotary.rows
    monkeypatch.setattr(ours.drafter._rotary, "rows", lambda at, count: positions.append(at.clone()) or rows(at, count))
    contexts = [ours.context(features_of(9)), ours.context(features_of(4))]
    positions.clear()
    ours.drafter.block_hidden([65, 66], contexts, 3)
    assert seen[0].tolist() == [[65, 58, 58, 58], [66, 58, 58, 58]]
    assert positions[0].tolist() == [9, 10, 11, 12, 4, 5, 6, 7]
    drafts = {tuple(ours.drafter.draft([anchor], contexts[:1], 3, [0.0]).token_ids[0]) for anchor in range(20)}
    assert len(drafts) > 10  # proposals change with the anchor


def _plain_walk(unary, ids, anchor, tables, gates):
    """The selector written out: at each slot the best candidate behind the one chosen before, the lower id in a tie."""
    predecessor_table, successor_table = tables
    path, previous = [], anchor
    for slot in range(unary.shape[0]):
        best = None
        for column, token in enumerate(ids[slot].tolist()):
            score = unary[slot, column].item()
            for r in range(gates.shape[1]):
                score += (predecessor_table[previous, r] * gates[slot, r] * successor_table[token, r]).item()
            if best is None or score > best[0] + 1e-9 or (abs(score - best[0]) <= 1e-9 and token < best[1]):
                best = (score, token)
        previous = best[1]
        path.append(previous)
    return path


@pytest.mark.parametrize("ties", [False, True])
def test_b16_selector_rank_8_top_4_written_out(tmp_path, ties):
    """The first four dimensions are zero, so a path that read only those would walk by the unary scores alone."""

    def edit(state):
        for name in ("predecessor_codebook", "successor_codebook"):
            table = state[f"candidate_selector.{name}.weight"]
            table[:, :4] = 0
            if ties:  # small whole numbers: sums are exact and often equal
                table.copy_(table.round().clamp(-1, 1))
        if ties:
            state["candidate_selector.hidden_projection.weight"].zero_()

    save_drafter(tmp_path, edit=edit)
    share = make_share()
    if ties:
        head = share.head_weight
        share = TargetShare(share.embedding, lambda hidden: (hidden @ head.T).clamp(max=0.5), None, V, H, TARGET_LAYERS)
    ours = Ours(tmp_path, share)
    state = load_file(tmp_path / "model.safetensors")
    tables = [state[f"candidate_selector.{name}_codebook.weight"].double() for name in ("predecessor", "successor")]
    unary_walks = 0
    for n in range(1, 13):
        context = ours.context(features_of(n, seed=n))
        hidden = ours.drafter.block_hidden([n], [context], 4)
        unary, ids = ours.drafter.candidates(hidden)
        assert ids.shape == (1, 4, 4)
        gates = hidden[0].double() @ state["candidate_selector.hidden_projection.weight"].double().T
        expected = _plain_walk(unary[0].double(), ids[0], n, tables, gates)
        assert ours.drafter.draft([n], [context], 4, [0.0]).token_ids == [expected]
        best = unary.max(-1, keepdim=True).values
        if ties:
            assert ((unary == best).sum(-1) > 1).any()  # there was something to break
        unary_walks += expected == ids.gather(-1, unary.argmax(-1, keepdim=True))[0, :, 0].tolist()
    assert unary_walks < 12 or ties


@pytest.mark.parametrize("own", ["none", "equal", "equal but for padding", "different"])
def test_b15_own_head(tmp_path, own):
    share = make_share(padding=7)
    different = torch.randn(V + 7, H, generator=torch.Generator().manual_seed(77))

    def edit(state):
        if own == "equal":
            state["lm_head.weight"] = share.head_weight[:V].clone()
        elif own == "equal but for padding":
            state["lm_head.weight"] = torch.cat([share.head_weight[:V], torch.zeros(7, H)])
        elif own == "different":
            state["lm_head.weight"] = different

    save_drafter(tmp_path, edit=edit)
    ours = Ours(tmp_path, share)
    assert ours.drafter.owns_head is (own == "different")
    hidden = ours.drafter.block_hidden([5], [ours.context(features_of(9))], 4)
    weight = different if own == "different" else share.head_weight
    expected = (hidden @ weight[:V].T).topk(4)
    got, ids = ours.drafter.candidates(hidden)
    torch.testing.assert_close(got.sort(descending=True).values, expected.values, rtol=1e-4, atol=1e-4)
    assert torch.equal(ids, expected.indices.sort().values)


@pytest.mark.parametrize("dflash2", [True, False])
@pytest.mark.parametrize("own_head", [True, False])
def test_b17_no_candidate_beyond_the_vocabulary(tmp_path, dflash2, own_head):
    """Vocabulary 259 padded to 264 with huge rows, in the target's ends, the codebooks and a head of the drafter's own."""

    def edit(state):
        if dflash2:
            for name in ("predecessor_codebook", "successor_codebook"):
                state[f"candidate_selector.{name}.weight"][259:] = 1e6
        if own_head:
            state["lm_head.weight"] = torch.cat([torch.randn(259, H), torch.full((5, H), 1e6)])

    save_drafter(tmp_path, dflash2=dflash2, vocab=264, edit=edit)
    ours = Ours(tmp_path, make_share(vocab=259, padding=5))
    context = ours.context(features_of(9))
    for anchor in range(0, 259, 37):
        _, ids = ours.drafter.candidates(ours.drafter.block_hidden([anchor], [context], 4))
        assert ids.max() < 259
        draft = ours.drafter.draft(
            [anchor], [context], 4, [1.0], torch.rand(1, 4, generator=torch.Generator().manual_seed(anchor))
        )
        assert draft.candidate_ids.max() < 259
        assert max(draft.token_ids[0]) < 259
        assert draft.candidate_probs.isfinite().all()


# ---- sampled drafts ---------------------------------------------------------------------------------------------------


def test_sampled_rows_are_the_realised_ones(tmp_path):
    """candidate_probs is softmax(score / temperature) behind the token that was really drawn before; greedy neighbours stay
    greedy; tokens are drawn by inverse CDF from exactly these rows."""
    save_drafter(tmp_path)
    ours = Ours(tmp_path)
    anchors, temperatures = [5, 6, 7], [0.7, 0.0, 2.0]
    contexts = [ours.context(features_of(n, seed=n)) for n in (9, 4, 30)]
    scores, ids = ours.lattice(anchors, contexts, 4)
    greedy = ours.drafter.draft(anchors, contexts, 4, [0.0] * 3)
    off_greedy = 0
    for seed in range(8):
        uniforms = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
        draft = ours.drafter.draft(anchors, contexts, 4, temperatures, uniforms)
        assert torch.equal(draft.candidate_ids, ids)
        assert draft.token_ids[1] == greedy.token_ids[1]
        for r in (0, 2):
            before = 0
            for slot, token in enumerate(draft.token_ids[r]):
                row = (scores[r, slot, before] / temperatures[r]).softmax(-1)
                assert torch.equal(draft.candidate_probs[r, slot], row)
                before = ids[r, slot].tolist().index(token)
                low = row[:before].double().sum() / row.double().sum()
                high = row[: before + 1].double().sum() / row.double().sum()
                assert low - 1e-7 <= uniforms[r, slot] <= high + 1e-7
                off_greedy += before != int(row.argmax())
    assert off_greedy > 10


@pytest.mark.parametrize("vocab", [97, 200])
def test_dflash1_sampled(tmp_path, vocab):
    """q is the softmax over the kept tokens: all of a small vocabulary, the 128 best of a larger one."""
    save_drafter(tmp_path, dflash2=False, vocab=vocab)
    ours = Ours(tmp_path, make_share(vocab))
    context = ours.context(features_of(9))
    kept = min(vocab, 128)
    logits = ours.share.head(ours.drafter.block_hidden([5], [context], 4))[0]
    draft = ours.drafter.draft([5], [context], 4, [1.3], torch.tensor([[0.0, 0.3, 0.6, 0.999]]))
    assert draft.candidate_probs.shape == (1, 4, kept)
    best = logits.topk(kept).indices.sort().values
    assert torch.equal(draft.candidate_ids[0], best)
    torch.testing.assert_close(
        draft.candidate_probs[0], (logits.gather(-1, best) / 1.3).softmax(-1), rtol=1e-5, atol=1e-7
    )
    assert draft.token_ids[0][0] == int(best[0, 0])
    assert draft.token_ids[0][3] >= int(best[3, -10])


@pytest.mark.parametrize("dflash2", [True, False])
def test_matching_rows_race_with_the_noise_of_their_candidates(tmp_path, dflash2):
    """Greedy, matching and sampled requests in one pass: each drafts what it drafts alone; a matching one takes the best
    score / temperature + Gumbel noise behind the token taken before."""
    save_drafter(tmp_path, dflash2=dflash2)
    ours = Ours(tmp_path)
    anchors, temperatures, matching = [5, 6, 7, 8], [0.7, 0.0, 2.0, 1.0], [True, True, False, True]
    contexts = [ours.context(features_of(n, seed=n)) for n in (9, 4, 30, 12)]
    hidden = ours.drafter.block_hidden(anchors, contexts, 4)
    unary, ids = ours.drafter.candidates(hidden)
    scores = ours.lattice(anchors, contexts, 4)[0] if dflash2 else unary[:, :, None]
    greedy = ours.drafter.draft(anchors, contexts, 4, [0.0] * 4)
    off_greedy = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(4, 4, generator=generator)
        table = torch.rand(4, 4, 1000, generator=generator).double().neg().log1p().neg()

        def noise_of(*requests, table=table):
            return lambda ids: table[list(requests)].gather(-1, ids)

        draft = ours.drafter.draft(anchors, contexts, 4, temperatures, uniforms, matching, noise_of(0, 3))
        assert draft.token_ids[1] == greedy.token_ids[1]
        alone = ours.drafter.draft(anchors[2:3], contexts[2:3], 4, [2.0], uniforms[2:3])
        assert draft.token_ids[2] == alone.token_ids[0]
        assert torch.equal(draft.candidate_ids[2], alone.candidate_ids[0])
        for r in (0, 3):
            alone = ours.drafter.draft(
                anchors[r : r + 1], contexts[r : r + 1], 4, temperatures[r : r + 1], None, [True], noise_of(r)
            )
            assert draft.token_ids[r] == alone.token_ids[0]
            assert alone.candidate_ids is None
            assert alone.candidate_probs is None
            before = 0
            for slot, token in enumerate(draft.token_ids[r]):
                row = scores[r, slot, before if dflash2 else 0].double()
                gumbel = -table[r, slot, ids[r, slot]].log()
                best = int((row / temperatures[r] + gumbel).argmax())
                assert token == int(ids[r, slot, best])
                before = best
                off_greedy += best != int(row.argmax())
    assert off_greedy > 10


# ---- options that the official package does not have, written out -----------------------------------------------------


def _rotate(x, positions, theta, halves):
    """x [n, heads, D] in float64."""
    dim = x.shape[-1]
    angles = positions[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = (x[..., : dim // 2], x[..., dim // 2 :]) if halves else (x[..., 0::2], x[..., 1::2])
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


def plain_dflash1(folder, features, anchor, width, share, *, halves=True, value_scale=1.0, sinks=False, mask=None):
    """A whole bidirectional DFlash 1 pass in float64, every step spelled out."""
    w = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    norm = lambda x, name: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w[name]  # noqa: E731
    context = norm(features.double() @ w["fc.weight"].T, "hidden_norm.weight")
    x = share.embedding[[anchor] + [MASK] * width].double()
    if mask is not None:
        x[1:] = mask.double()
    count = features.shape[0]
    places = torch.arange(count + width + 1)
    for i in range(LAYERS):
        name = f"layers.{i}.self_attn"
        u = norm(x, f"layers.{i}.input_layernorm.weight")
        both = torch.cat([context, u])
        q = norm((u @ w[f"{name}.q_proj.weight"].T).view(-1, 4, 16), f"{name}.q_norm.weight")
        k = norm((both @ w[f"{name}.k_proj.weight"].T).view(-1, 2, 16), f"{name}.k_norm.weight")
        v = (both @ w[f"{name}.v_proj.weight"].T).view(-1, 2, 16) * value_scale
        q, k = _rotate(q, places[count:], 1000.0, halves), _rotate(k, places, 1000.0, halves)
        out = torch.empty_like(q)
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / math.sqrt(16)
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if sinks:
                total = total + w[f"{name}.attention_sink_bias"][head].exp()
            out[:, head] = weights / total @ v[:, head // 2]
        x = x + out.flatten(1) @ w[f"{name}.o_proj.weight"].T
        m = norm(x, f"layers.{i}.post_attention_layernorm.weight")
        gate, up = (m @ w[f"layers.{i}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, "norm.weight")[1:]


@pytest.mark.parametrize("option", ["none", "value_scale", "sinks", "pairs", "mask"])
def test_other_options_written_out(tmp_path, option):
    method = {
        "value_scale": {"attention_value_scale": 0.6},
        "sinks": {"attention_sink_bias": True},
        "pairs": {"is_neox_style": False},
    }

    def edit(state):
        if option == "sinks":
            for i in range(LAYERS):
                state[f"layers.{i}.self_attn.attention_sink_bias"] = torch.tensor([-1.0, 0.0, 2.0, 4.0])

    save_drafter(tmp_path, dflash2=False, method=method.get(option), edit=edit)
    row = torch.randn(H, generator=torch.Generator().manual_seed(8))
    if option == "mask":
        torch.save({"embedding": row, "mask_token_id": MASK}, tmp_path / "mask_embedding.pt")
    ours = Ours(tmp_path)
    features = features_of(12)
    arguments = {
        "none": {},
        "value_scale": {"value_scale": 0.6},
        "sinks": {"sinks": True},
        "pairs": {"halves": False},
        "mask": {"mask": row},
    }
    expected = plain_dflash1(tmp_path, features, 5, 4, ours.share, **arguments[option])
    got = ours.drafter.block_hidden([5], [ours.context(features, 7)], 4)[0]
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)
    if option != "none":  # the option changes something
        assert (plain_dflash1(tmp_path, features, 5, 4, ours.share) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("dflash2", [True, False])
def test_the_walks_operator_drafts_the_same(tmp_path, dflash2):
    """`selector_walk`, which draws its noise itself, against this drafter's walk with the service's noise: ids and rows to the bit."""
    save_drafter(tmp_path, dflash2=dflash2)
    ours = Ours(tmp_path)
    drafter, selector = ours.drafter, ours.drafter.candidate_selector
    anchors, temperatures = [5, 6, 7, 8], [0.7, 0.0, 2.0, 1.0]
    contexts = [ours.context(features_of(n, seed=n)) for n in (9, 4, 30, 12)]
    hidden = drafter.block_hidden(anchors, contexts, 4)
    unary, ids = drafter.candidates(hidden)
    parts = (None,) * 3
    if selector is not None:
        parts = (selector.project(hidden), selector.predecessor_codebook, selector.successor_codebook)
    rules = torch.tensor([DRAW, GREEDY, DRAW, RACE], dtype=torch.int32)
    bases = [context.num_committed for context in contexts]
    for first in (0, 2**64 - 2, 12345):
        seeds = [(first + r) % 2**64 for r in range(4)]
        slots = ([seed for seed in seeds for _ in range(4)], [base + 1 + slot for base in bases for slot in range(4)])
        draft = drafter.draft(
            anchors,
            contexts,
            4,
            temperatures,
            uniforms(*slots, Purpose.DRAFT).view(4, 4),
            [False, False, False, True],
            lambda own, slots=slots: exponentials(slots[0][12:], slots[1][12:], own.flatten(0, 1)).view(own.shape),
        )
        signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])
        divisor = torch.tensor([0.7, 1e-5, 2.0, 1.0])
        tokens, probs = selector_walk(
            unary, ids, *parts, torch.tensor(anchors), divisor, rules, signed, torch.tensor(bases)
        )
        assert tokens.tolist() == draft.token_ids
        assert torch.equal(probs[[0, 2]], draft.candidate_probs[[0, 2]])
