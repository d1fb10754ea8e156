"""Drafter checkpoints: both formats read to the same description and the same drafts, and every drafter that does not fit is
refused by a message that names the key or tensor, what was expected and what was got."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.dflash2 import load_context_projection, load_drafter
from dflash2_ray.models.drafter_checkpoint import expected_shapes
from dflash2_ray.models.drafter_config import LayerAttention, read_drafter_config
from dflash2_ray.models.target_share import TargetShare

V, H = 97, 32
SHAPE = {
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}


def z_lab(dflash2=True, method=None, **keys):
    own = {
        "block_size": 4,
        "mask_token_id": 96,
        "target_layer_ids": [3, 1],
        **(DFLASH2 if dflash2 else {}),
        **(method or {}),
    }
    name = "DFlash2DraftModel" if dflash2 else "DFlashDraftModel"
    raw = {
        "architectures": [name],
        "model_type": "qwen3",
        **SHAPE,
        "num_target_layers": 6,
        "is_causal": False,
        "dflash_config": {key: value for key, value in own.items() if value is not None},
        **keys,
    }
    return {key: value for key, value in raw.items() if value is not None}


def speculators(dflash2=True, backbone=None, **keys):
    raw = {
        "speculators_model_type": "dflash2" if dflash2 else "dflash",
        "architectures": ["DFlash2Speculator"],
        "transformer_layer_config": SHAPE | (backbone or {}),
        "aux_hidden_state_layer_ids": [4, 2],
        "block_size": 4,
        "mask_token_id": 96,
        **(DFLASH2 if dflash2 else {}),
        "num_target_layers": 6,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
        **keys,
    }
    return {key: value for key, value in raw.items() if value is not None}


def write(folder, raw, edit=None, rename=lambda name: name):
    """Random weights of every tensor that the untouched config asks for, then `edit(state)`."""
    folder.mkdir(parents=True, exist_ok=True)
    dflash2 = "dflash2" in str(raw.get("speculators_model_type", raw.get("architectures"))).lower()
    (folder / "config.json").write_text(json.dumps(z_lab(dflash2)))
    shapes = expected_shapes(read_drafter_config(folder))
    generator = torch.Generator().manual_seed(4)
    state = {}
    for name, shape in shapes.items():
        state[name] = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        if name.endswith("norm.weight"):
            state[name] += 1
    if edit:
        edit(state)
    save_file({rename(name): value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def make_share(vocab=V, padding=0, hidden=H, layers=6):
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(vocab + padding, hidden, generator=generator)
    weight = torch.randn(vocab + padding, hidden, generator=generator)
    return TargetShare(embedding, lambda hidden: hidden @ weight[:vocab].T, weight, vocab, hidden, layers)


def load(folder, share=None):
    return load_drafter(folder, read_drafter_config(folder), share or make_share(), dtype="float32", device="cpu")


def hidden_of(folder, share=None):
    """What the drafter makes of a fixed context: every tensor of the file has a part in it or in the candidates."""
    drafter = load(folder, share)
    features = torch.randn(9, 2 * H, generator=torch.Generator().manual_seed(2))
    context = drafter.new_context()
    rows = load_context_projection(folder, drafter.config, "float32", "cpu")(features)
    context.append(drafter.context_kv(rows, torch.arange(9), 9))
    return drafter.block_hidden([5], [context], 3), drafter.draft([5], [context], 3, [0.0]).token_ids[0]


# ---- two formats, one description -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dflash2", [True, False])
def test_formats_read_to_the_same_description(tmp_path, dflash2):
    one = read_drafter_config(write(tmp_path / "one", z_lab(dflash2)))
    two = read_drafter_config(write(tmp_path / "two", speculators(dflash2)))
    assert (one.speculators_format, two.speculators_format) == (False, True)
    assert (one.name, two.name) == ("one", "two")
    assert dataclasses.replace(two, speculators_format=False, name=one.name) == one
    assert one.taps == (3, 1)  # t, and t + 1 in the speculators format; in the checkpoint's own order
    assert one.attention == (LayerAttention(6, False), LayerAttention(None, False))
    assert one.is_dflash2 is dflash2
    assert (one.draft_block_size, one.mask_token_id, one.conv_group_size) == (4, 96, 8 if dflash2 else 0)


def test_both_formats_draft_the_same(tmp_path):
    reference, tokens = hidden_of(write(tmp_path / "a", z_lab()))
    share = make_share()

    def ships_ends(state):
        state |= {"embed_tokens.weight": share.embedding, "lm_head.weight": share.head_weight}
        state["t2d"] = torch.ones(V, dtype=torch.bool)
        state["verifier_norm.weight"] = torch.ones(H)

    got, other = hidden_of(write(tmp_path / "b", speculators(), edit=ships_ends), share)
    assert torch.equal(got, reference)
    assert other == tokens


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"{name}.weight" if name.endswith("codebook") else name,
        lambda name: f"model.{name}",
        lambda name: name.replace("layers.0.", "midlayer."),
        lambda name: name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."),
    ],
    ids=["codebooks with .weight", "model. prefix", "midlayer", "encoder"],
)
def test_name_variants(tmp_path, rename):
    reference, tokens = hidden_of(write(tmp_path / "a", z_lab()))
    got, other = hidden_of(write(tmp_path / "b", z_lab(), rename=rename))
    assert torch.equal(got, reference)
    assert other == tokens


@pytest.mark.parametrize(
    ("raw", "causal"),
    [
        (speculators(), (False, False)),
        (speculators(dflash2=False), (False, False)),
        (speculators(sliding_window_non_causal=True), (False, False)),
        (speculators(sliding_window_non_causal=False), (True, True)),
        (z_lab(is_causal=None), (True, False)),
        (z_lab(is_causal=True), (True, True)),
        (z_lab(is_causal=None, method={"causal": False}), (False, False)),
        (z_lab(is_causal=True, method={"causal": False}), (True, True)),
    ],
)
def test_causality(tmp_path, raw, causal):
    config = read_drafter_config(write(tmp_path, raw))
    assert tuple(layer.causal for layer in config.attention) == causal
    assert [layer.window for layer in config.attention] == [6, None]


def test_windows(tmp_path):
    read = lambda **keys: [one.window for one in read_drafter_config(write(tmp_path, z_lab(**keys))).attention]  # noqa: E731
    full = ["full_attention"] * 2
    assert read(layer_types=None) == [None, None]
    assert read(layer_types=full) == [None, None]
    assert read(layer_types=full, method={"use_swa": True, "swa_window_size": 9}) == [9, 9]
    assert read(layer_types=full, method={"use_swa": True}) == [6, 6]
    assert read(method={"swa_window_size": 9}) == [9, None]
    assert read(layer_types=["sliding_attention"] * 28, use_sliding_window=False) == [6, 6]  # the raw key counts


def test_own_keys_win_over_top_level_ones(tmp_path):
    config = read_drafter_config(write(tmp_path, z_lab(block_size=16, target_layer_ids=[0])))
    assert (config.draft_block_size, config.taps) == (4, (3, 1))
    config = read_drafter_config(write(tmp_path, z_lab(method={"block_size": None}, block_size=8)))
    assert config.draft_block_size == 8
    assert read_drafter_config(write(tmp_path, z_lab(method={"block_size": None}))).draft_block_size == 16


def test_cloned_rotary_keys_are_ignored(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    reference, _ = hidden_of(write(tmp_path / "a", z_lab()))
    got, _ = hidden_of(write(tmp_path / "b", z_lab(rope_theta=None, rope_parameters=rope, partial_rotary_factor=0.25)))
    assert torch.equal(got, reference)
    other, _ = hidden_of(write(tmp_path / "c", z_lab(rope_theta=2000.0)))
    assert not torch.equal(other, reference)
    scaled, _ = hidden_of(write(tmp_path / "d", z_lab(rope_scaling={"type": "linear", "factor": 2.0})))
    assert not torch.equal(scaled, reference)


def test_draft_vocabulary_map(tmp_path):
    """DFlash 1: draft id → draft id + d2t, all candidates are target ids."""
    d2t = torch.arange(20) * 3  # draft id i means target id 4 i

    def edit(state):
        state |= {"d2t": d2t, "lm_head.weight": torch.randn(20, H, generator=torch.Generator().manual_seed(9))}

    folder = write(tmp_path, speculators(dflash2=False, draft_vocab_size=20), edit=edit)
    drafter = load(folder)
    hidden = torch.randn(1, 3, H, generator=torch.Generator().manual_seed(2))
    logits, ids = drafter.candidates(hidden)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert drafter.num_candidates == 20
    assert ids[0, 0].tolist() == list(range(0, 80, 4))
    torch.testing.assert_close(logits[0], hidden[0] @ head.T, rtol=1e-5, atol=1e-5)
    context = drafter.new_context()
    token_ids = drafter.draft([5], [context], 3, [0.0]).token_ids[0]
    assert token_ids == [4 * one for one in (drafter.block_hidden([5], [context], 3)[0] @ head.T).argmax(-1).tolist()]


def test_mask_embedding_file(tmp_path):
    reference, _ = hidden_of(write(tmp_path, z_lab()))
    torch.save({"embedding": make_share().embedding[96], "mask_token_id": 96}, tmp_path / "mask_embedding.pt")
    same, _ = hidden_of(tmp_path)
    assert torch.equal(same, reference)
    torch.save({"embedding": torch.ones(1, H)}, tmp_path / "mask_embedding.pt")
    other, _ = hidden_of(tmp_path)
    assert not torch.equal(other, reference)


@pytest.mark.parametrize(
    ("stored", "parts"),
    [
        ({"embedding": torch.ones(H), "per_position": torch.ones(3, H)}, ["per_position"]),
        ({"embedding": torch.ones(H), "mask_token_id": 95}, ["mask_token_id", "96", "95"]),
        ({"embedding": torch.ones(H - 1)}, ["embedding", "32", "31"]),
        ({}, ["embedding", "32", "None"]),
        (torch.ones(H), ["mask_embedding.pt"]),
        ("not a torch file", ["mask_embedding.pt"]),
    ],
    ids=["per position", "other token", "other width", "empty", "bare tensor", "broken"],
)
def test_mask_embedding_refusals(tmp_path, stored, parts):
    write(tmp_path, z_lab())
    path = tmp_path / "mask_embedding.pt"
    path.write_text(stored) if isinstance(stored, str) else torch.save(stored, path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    for part in parts:
        assert part in str(caught.value)


# ---- refusals ---------------------------------------------------------------------------------------------------------

CODEBOOK = "candidate_selector.successor_codebook"
CONFIG_REFUSALS = {
    "missing taps": (z_lab(method={"target_layer_ids": None}), ["target_layer_ids", "None"]),
    "empty taps": (z_lab(method={"target_layer_ids": []}), ["target_layer_ids", "[]"]),
    "taps of another type": (z_lab(method={"target_layer_ids": [1, "2"]}), ["target_layer_ids", "'2'"]),
    "negative taps": (z_lab(method={"target_layer_ids": [1, -2]}), ["target_layer_ids", "-2"]),
    "missing aux ids": (speculators(aux_hidden_state_layer_ids=None), ["aux_hidden_state_layer_ids", "None"]),
    "negative aux ids": (speculators(aux_hidden_state_layer_ids=[-1, 2]), ["aux_hidden_state_layer_ids", "-1"]),
    "tap beyond the target": (z_lab(method={"target_layer_ids": [3, 6]}), ["layer 6", "0 … 5"]),
    "aux id beyond the target": (speculators(aux_hidden_state_layer_ids=[4, 7]), ["layer 6", "0 … 5"]),
    "block of one": (z_lab(method={"block_size": 1}), ["block_size", "2", "1"]),
    "block of words": (z_lab(method={"block_size": "four"}), ["block_size", "'four'"]),
    "mask missing": (z_lab(method={"mask_token_id": None}), ["mask_token_id", "none"]),
    "mask negative": (z_lab(method={"mask_token_id": -1}), ["mask_token_id", "-1"]),
    "mask too large": (z_lab(method={"mask_token_id": 97}), ["mask_token_id", "97 embedding rows"]),
    "unknown layer type": (
        z_lab(layer_types=["sliding_attention", "chunked_attention"]),
        ["layer_types", "chunked_attention"],
    ),
    "too few layer types": (z_lab(layer_types=["full_attention"]), ["layer_types", "2"]),
    "sliding without width": (z_lab(sliding_window=None), ["sliding_window", "None"]),
    "group does not divide": (z_lab(method={"conv_group_size": 5}), ["conv_group_size", "32", "5"]),
    "group missing": (z_lab(method={"conv_group_size": None}), ["conv_group_size", "None"]),
    "rank missing": (speculators(selector_rank=None), ["selector_rank", "None"]),
    "top-k beyond support": (z_lab(method={"selector_top_k": 98}), ["selector_top_k", "97", "98"]),
    "top-k of zero": (z_lab(method={"selector_top_k": 0}), ["selector_top_k", "0"]),
    "another kernel size": (z_lab(method={"conv_kernel_size": 3}), ["base_kernel", "[2, 3, 32]", "[2, 2, 32]"]),
    "another rank": (z_lab(method={"selector_rank": 8}), ["codebook", "[97, 8]", "[97, 4]"]),
    "DFlash 2 keys in DFlash 1": (z_lab(architectures=["DFlashDraftModel"]), ["conv_kernel_size", "DFlashDraftModel"]),
    "not a drafter": (z_lab(architectures=["Qwen3ForCausalLM"]), ["DFlash2DraftModel", "Qwen3ForCausalLM"]),
    "no architecture": (z_lab(architectures=None), ["architectures", "[]"]),
    "another speculator": (
        speculators(speculators_model_type="eagle3"),
        ["speculators_model_type", "dflash2", "eagle3"],
    ),
    "sample_from_anchor": (z_lab(method={"sample_from_anchor": True}), ["sample_from_anchor", "false"]),
    "sample_from_anchor, speculators": (speculators(sample_from_anchor=True), ["sample_from_anchor", "false"]),
    "no aux hidden state": (z_lab(method={"use_aux_hidden_state": False}), ["use_aux_hidden_state", "true"]),
    "Domino": (z_lab(method={"gru_hidden_dim": 64}), ["gru_hidden_dim", "Domino"]),
    "Domino projector": (z_lab(method={"projector_type": "domino"}), ["projector_type", "domino"]),
    "wrong hidden size": (z_lab(hidden_size=64), ["64", "32"]),
    "wrong target width": (z_lab(target_hidden_size=48), ["48", "32"]),
    "wrong target depth": (z_lab(num_target_layers=7), ["num_target_layers", "7", "6 layers"]),
    "smaller vocabulary": (z_lab(vocab_size=90), ["vocabulary", "90", "97"]),
    "larger vocabulary": (z_lab(vocab_size=98), ["codebook", "[98, 4]", "[97, 4]"]),
    "draft vocabulary with DFlash 2": (speculators(draft_vocab_size=20), ["draft_vocab_size", "97", "20"]),
    "draft vocabulary without a map": (speculators(dflash2=False, draft_vocab_size=20), ["d2t", "20"]),
    "speculative tokens": (
        speculators(speculators_config={"proposal_methods": [{"speculative_tokens": 4}]}),
        ["speculative_tokens", "3", "4"],
    ),
    "activation": (z_lab(hidden_act="gelu"), ["hidden_act", "silu", "gelu"]),
    "heads": (z_lab(num_attention_heads=3, num_key_value_heads=2), ["num_attention_heads", "3", "2"]),
    "no width": (z_lab(hidden_size=None), ["hidden_size", "None"]),
    "dynamic rope": (z_lab(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["rope_type", "dynamic"]),
    "longrope": (z_lab(rope_parameters={"rope_type": "longrope"}), ["rope_type", "longrope"]),
    "rope without its factor": (z_lab(rope_scaling={"rope_type": "linear"}), ["factor"]),
    "quantised": (z_lab(quantization_config={"quant_method": "fp8"}), ["quant"]),
    "soft-cap of words": (z_lab(method={"final_logit_softcapping": "thirty"}), ["final_logit_softcapping", "thirty"]),
    "backbone missing": (speculators(transformer_layer_config=None), ["transformer_layer_config", "None"]),
    "method is a list": (z_lab(dflash_config=[1]), ["dflash_config", "[1]"]),
}


def _change(name, value):
    def edit(state):
        state.pop(name) if value is None else state.update({name: value})

    return edit


TENSOR_REFUSALS = {
    "missing tensor": (z_lab(), _change("layers.1.mlp.up_proj.weight", None), ["layers.1.mlp.up_proj.weight", "missing", "[48, 32]"]),
    "missing conv": (z_lab(), _change("layers.0.mlp_conv.base_kernel", None), ["layers.0.mlp_conv.base_kernel", "[2, 2, 32]"]),
    "fc for other taps": (z_lab(), _change("fc.weight", torch.zeros(H, 3 * H)), ["fc.weight", "[32, 64]", "[32, 96]"]),
    "fc missing": (z_lab(), _change("fc.weight", None), ["fc.weight", "missing"]),
    "codebook rows": (z_lab(), _change(CODEBOOK, torch.zeros(96, 4)), [CODEBOOK, "[97, 4]", "[96, 4]"]),
    "unexpected tensor": (z_lab(), _change("layers.2.mlp.up_proj.weight", torch.zeros(48, 32)), ["layers.2.mlp.up_proj.weight", "no place"]),
    "unexpected bias": (z_lab(), _change("layers.0.self_attn.o_proj.bias", torch.zeros(H)), ["layers.0.self_attn.o_proj.bias", "no place"]),
    "bias missing": (z_lab(attention_bias=True), None, ["self_attn.q_proj.bias", "missing"]),
    "sinks missing": (z_lab(method={"attention_sink_bias": True}), None, ["attention_sink_bias", "missing"]),
    "DFlash 2 tensors in DFlash 1": (
        z_lab(False), _change("layers.0.mlp_conv.base_kernel", torch.zeros(2, 2, H)), ["layers.0.mlp_conv.base_kernel", "DFlash 1"],
    ),
    "small head": (z_lab(), _change("lm_head.weight", torch.zeros(90, H)), ["lm_head.weight", "[97, 32]", "[90, 32]"]),
    "narrow embedding": (z_lab(), _change("embed_tokens.weight", torch.zeros(V, 16)), ["embed_tokens.weight", "[97, 32]", "[97, 16]"]),
    "flat head": (z_lab(), _change("lm_head.weight", torch.zeros(V)), ["lm_head.weight", "[97, 32]", "[97]"]),
    "map of another length": (
        speculators(dflash2=False, draft_vocab_size=20),
        lambda state: state.update({"d2t": torch.zeros(19, dtype=torch.int64), "lm_head.weight": torch.zeros(20, H)}),
        ["d2t", "[20]", "[19]"],
    ),
    "map out of range": (
        speculators(dflash2=False, draft_vocab_size=20),
        lambda state: state.update({"d2t": torch.full((20,), 90), "lm_head.weight": torch.zeros(20, H)}),
        ["d2t", "97"],
    ),
}  # fmt: skip


def _refused(folder, parts, share=None):
    with pytest.raises(CheckpointError) as caught:
        load(folder, share)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", CONFIG_REFUSALS)
def test_config_refusals(tmp_path, name):
    raw, parts = CONFIG_REFUSALS[name]
    _refused(write(tmp_path, raw), parts)


@pytest.mark.parametrize("name", TENSOR_REFUSALS)
def test_tensor_refusals(tmp_path, name):
    raw, edit, parts = TENSOR_REFUSALS[name]
    _refused(write(tmp_path, raw, edit=edit), parts)


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda folder: (folder / "config.json").write_text("{'single': quotes}"), ["config.json"]),
        (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "list"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["*.safetensors", "none"]),
        (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-64]), ["model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), ["model.safetensors"]),
    ],
    ids=["broken JSON", "JSON list", "no config", "no weights", "truncated", "empty file"],
)  # fmt: skip
def test_damaged_folders(tmp_path, damage, parts):
    write(tmp_path, z_lab())
    load(tmp_path)  # whole, before
    damage(tmp_path)
    _refused(tmp_path, parts)


def test_b17_map_must_stay_inside_the_target_vocabulary(tmp_path):
    """A drafter vocabulary padded to 104 does not make target ids 97 … 103 proposable."""

    def edit(state):
        state |= {"d2t": torch.full((20,), 80), "lm_head.weight": torch.randn(20, H)}  # target ids 80 … 99

    raw = speculators(dflash2=False, draft_vocab_size=20, backbone={"vocab_size": 104})
    _refused(write(tmp_path, raw, edit=edit), ["d2t", "97"], make_share(V, padding=7))


def test_projection_alone(tmp_path):
    """`fc` runs with the target: it is read alone, and named when it is not there."""
    folder = write(tmp_path, z_lab(), rename=lambda name: f"model.{name}")
    config = read_drafter_config(folder)
    features = torch.randn(3, 2 * H, generator=torch.Generator().manual_seed(2))
    expected = features @ load_file(folder / "model.safetensors")["model.fc.weight"].T
    torch.testing.assert_close(
        load_context_projection(folder, config, "float32", "cpu")(features), expected, rtol=1e-5, atol=1e-5
    )
    write(tmp_path, z_lab(), edit=_change("fc.weight", None))
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_context_projection(folder, config, "float32", "cpu")
