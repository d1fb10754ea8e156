"""The target on tiny random models: logits, taps and cache equal transformers' own forward, whatever the batch looks like;
what cannot be served is refused by name (cases B14, B17)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from dflash2_kernels import row_attention, row_passes
from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.target import Target

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
MODELS = {
    "llama-llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-linear": lambda: LlamaConfig(**SHAPE, rope_parameters=LINEAR, head_dim=24),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "mistral-window": lambda: MistralConfig(**SHAPE, sliding_window=8),
    "qwen2-biases": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2-mixed-windows": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
}
PAGE = 4
CONTIGUOUS = {"a": list(range(12)), "b": list(range(12, 24)), "c": list(range(24, 36))}
SCATTERED = {"a": list(range(35, 0, -3)), "b": list(range(34, 0, -3)), "c": list(range(33, -1, -3))}
# Each step is one flat batch: (request, rows). A prefill chunk, one-row decodes and multi-row decodes stand side by side.
STEPS = [
    [("a", 11)],
    [("b", 5), ("a", 1)],
    [("a", 4), ("b", 7), ("c", 1)],
    [("c", 3), ("b", 1), ("a", 1)],
    [("c", 20), ("a", 9), ("b", 2)],
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save_model(config, folder, **settings):
    """A random model whose weights are large enough to matter: logits of about unit size, biases and norms not trivial."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.normal_(1, 0.2)
            elif value.dim() == 1:
                value.normal_(0, 0.3)
            else:
                value.normal_(0, 1.2 * value.shape[1] ** -0.5)
    model.save_pretrained(folder, **settings)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(kind)` → folder of a saved model; one per kind for the module."""
    folders = {}

    def get(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            save_model(MODELS[kind](), folders[kind])
        return folders[kind]

    return get


def oracle(folder, ids, implementation="eager"):
    """transformers' own logits and the output of every decoder layer, by hooks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation).eval()
    outputs = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda module, args, out: outputs.append((out[0] if isinstance(out, tuple) else out)[0])
        )
    with torch.no_grad():
        result = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return result.logits[0], outputs, result.hidden_states


def flat_step(target, cache, parts, tokens, starts, pages):
    """One forward over `parts` = [(request, rows)]; returns logits and features of all rows."""
    ids, positions, slots, spans = [], [], [], []
    for name, count in parts:
        start = starts[name]
        spans.append(Span(len(ids), count, start + count, tuple(pages[name])))
        ids += tokens[name][start : start + count]
        positions += range(start, start + count)
        slots += [pages[name][p // PAGE] * PAGE + p % PAGE for p in range(start, start + count)]
    batch = AttentionBatch(torch.tensor(slots), tuple(spans), PAGE)
    hidden, features = target.forward(torch.tensor(ids), torch.tensor(positions), batch, cache)
    return target.logits(hidden), features


def run_steps(target, steps, tokens, pages, num_pages=36):
    """All rows of each request in order: (logits, features) by request."""
    cache = target.allocate_cache(num_pages, PAGE)
    starts = dict.fromkeys(tokens, 0)
    rows = {name: ([], []) for name in tokens}
    for parts in steps:
        logits, features = flat_step(target, cache, parts, tokens, starts, pages)
        offset = 0
        for name, count in parts:
            rows[name][0].append(logits[offset : offset + count])
            if features is not None:
                rows[name][1].append(features[offset : offset + count])
            starts[name] += count
            offset += count
    return {name: (torch.cat(one), torch.cat(two) if two else None) for name, (one, two) in rows.items()}


def random_tokens(vocab=97):
    generator = torch.Generator().manual_seed(3)
    lengths = {name: sum(count for parts in STEPS for who, count in parts if who == name) for name in "abc"}
    return {name: torch.randint(vocab, (length,), generator=generator).tolist() for name, length in lengths.items()}


@pytest.fixture(params=["as it runs here", "tiles"])
def attention_path(request, monkeypatch):
    """What this machine takes, and what runs without C for it."""
    if request.param == "tiles":
        monkeypatch.setattr(row_attention, "available", lambda head_dim: False)
        monkeypatch.setattr(row_passes, "available", lambda: False)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_taps_equal_transformers(saved, kind, fast, attention_path):
    folder, tokens = saved(kind), random_tokens()
    target = Target.load(folder, dtype="float32", device="cpu", taps=(1, -1, 2), fast=fast)
    assert target.num_fused_layers == (3 if fast else 0)
    for pages in (CONTIGUOUS, SCATTERED):
        got = run_steps(target, STEPS, tokens, pages)
        for name, ids in tokens.items():
            logits, outputs, states = oracle(folder, ids)
            assert logits.std() > 0.3  # the comparison means something
            assert got[name][0].dtype == torch.float32
            torch.testing.assert_close(got[name][0], logits, rtol=1e-4, atol=1e-4)
            # B14: tap t is the output of layer t = hidden_states[t + 1]; -1 the embeddings; in the order asked for
            expected = torch.cat([states[2][0], states[0][0], outputs[2]], dim=-1)
            torch.testing.assert_close(states[2][0], outputs[1], rtol=0, atol=0)
            torch.testing.assert_close(got[name][1], expected, rtol=1e-4, atol=1e-4)


def test_window_matters(saved):
    """The windowed models above would be wrong as full attention: a token outside every window changes nothing behind it."""
    target = Target.load(saved("mistral-window"), dtype="float32", device="cpu")
    tokens = {"a": [1] * 36}
    one = run_steps(target, [[("a", 36)]], tokens, CONTIGUOUS)["a"][0]
    tokens["a"][0] = 50
    two = run_steps(target, [[("a", 36)]], tokens, CONTIGUOUS)["a"][0]
    reach = 3 * 7  # layers × (window - 1)
    assert torch.equal(one[reach + 1 :], two[reach + 1 :])
    assert not torch.equal(one[7], two[7])
    assert (one[reach] != two[reach]).any()


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_long_chunks_and_growing_rotary_tables(tmp_path, window):
    """Chunks beyond the 256 rows that are scored at once, positions beyond the first rotary table."""
    save_model(MistralConfig(**(SHAPE | {"max_position_embeddings": 1024}), sliding_window=window), tmp_path)
    tokens = {"a": torch.randint(97, (640,), generator=torch.Generator().manual_seed(5)).tolist()}
    pages = {"a": list(range(160))}
    target = Target.load(tmp_path, dtype="float32", device="cpu")
    got = run_steps(target, [[("a", 7)], [("a", 300)], [("a", 1)], [("a", 332)]], tokens, pages, num_pages=160)["a"][0]
    torch.testing.assert_close(got, oracle(tmp_path, tokens["a"])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        lambda: Olmo2Config(**SHAPE),
        lambda: Phi3Config(**SHAPE, sliding_window=8),
        lambda: GraniteConfig(**SHAPE, residual_multiplier=0.5, attention_multiplier=0.4),
    ],
    ids=["olmo2", "phi3", "granite"],
)
def test_unusual_layers_run_as_transformers_wrote_them(tmp_path, config):
    """Layers with norms elsewhere or with packed weights are not fused, and right all the same."""
    save_model(config(), tmp_path)
    target = Target.load(tmp_path, dtype="float32", device="cpu", taps=(0,))
    assert target.num_fused_layers == 0
    tokens = random_tokens()
    got = run_steps(target, STEPS, tokens, SCATTERED)
    for name, ids in tokens.items():
        logits, outputs, _ = oracle(tmp_path, ids)
        torch.testing.assert_close(got[name][0], logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[name][1], outputs[0], rtol=1e-4, atol=1e-4)


def test_sdpa_agrees_too(saved):
    ids = random_tokens()["a"]
    target = Target.load(saved("llama-llama3"), dtype="float32", device="cpu")
    got = run_steps(target, [[("a", len(ids))]], {"a": ids}, CONTIGUOUS)["a"][0]
    torch.testing.assert_close(got, oracle(saved("llama-llama3"), ids, "sdpa")[0], rtol=1e-4, atol=1e-4)


def test_b14_tap_is_the_output_of_its_layer(tmp_path):
    """Layer i adds the constant i + 1 and nothing else, so tap t is the embedding plus 1 + … + (t + 1)."""
    model = save_model(LlamaConfig(**SHAPE, attention_bias=True), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for index in range(3):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            state[f"model.layers.{index}.{name}"].zero_()
        state[f"model.layers.{index}.self_attn.o_proj.bias"].fill_(index + 1)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for fast in (True, False):
        target = Target.load(tmp_path, dtype="float32", device="cpu", taps=(1, 2, 0, -1), fast=fast)
        ids = [3, 14, 15, 92, 65]
        _, features = run_steps(target, [[("a", 5)]], {"a": ids}, CONTIGUOUS)["a"]
        embedded = model.model.embed_tokens.weight.detach()[ids]
        expected = torch.cat([embedded + 3, embedded + 6, embedded + 1, embedded], dim=-1)
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama-llama3", "qwen3", "mistral-window", "qwen2-biases"])
def test_rows_do_not_depend_on_neighbours(saved, kind):
    """Bit for bit in fp32: every decode row alone, in company, and whatever the company's ids are."""
    target = Target.load(saved(kind), dtype="float32", device="cpu", taps=(0, 2))
    tokens = random_tokens()
    together = run_steps(target, STEPS, tokens, CONTIGUOUS)
    for name in tokens:
        own = [[(who, count) for who, count in parts if who == name] for parts in STEPS]
        alone = run_steps(target, [parts for parts in own if parts], {name: tokens[name]}, SCATTERED)
        assert torch.equal(alone[name][0], together[name][0])
        assert torch.equal(alone[name][1], together[name][1])


def test_b19_neighbours_content_has_no_effect(saved):
    target = Target.load(saved("qwen3"), dtype="float32", device="cpu", taps=(0, 2))
    tokens = random_tokens()
    first = run_steps(target, STEPS, tokens, CONTIGUOUS)
    other = run_steps(target, STEPS, tokens | {"b": [(one + 1) % 97 for one in tokens["b"]]}, CONTIGUOUS)
    assert torch.equal(first["a"][0], other["a"][0])
    assert torch.equal(first["c"][1], other["c"][1])
    assert not torch.equal(first["b"][0], other["b"][0])


def test_sharded_checkpoint(tmp_path, saved):
    folder = saved("qwen3-untied")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = random_tokens()
    one = run_steps(Target.load(folder, dtype="float32", device="cpu"), STEPS, tokens, CONTIGUOUS)
    two = run_steps(Target.load(tmp_path, dtype="float32", device="cpu"), STEPS, tokens, CONTIGUOUS)
    assert torch.equal(one["a"][0], two["a"][0])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"], ids=["tied", "untied"])
def test_b17_padded_rows_change_nothing(tmp_path, saved, kind):
    folder, tokens = saved(kind), random_tokens()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            state[name] = torch.cat([state[name], torch.full((7, 64), 1e6)])
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    one = run_steps(Target.load(folder, dtype="float32", device="cpu"), STEPS, tokens, CONTIGUOUS)
    target = Target.load(tmp_path, dtype="float32", device="cpu")
    two = run_steps(target, STEPS, tokens, CONTIGUOUS)
    assert two["a"][0].shape[1] == target.share().vocab_size == 97
    for name in tokens:
        assert torch.equal(one[name][0], two[name][0])


# ---- refusals -------------------------------------------------------------------------------------------------------


def _edit_config(**changes):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _edit_tensors(change):
    def edit(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def _lost_shard(folder):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _misplaced(folder):
    index = {"metadata": {}, "weight_map": {"model.nowhere.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DOWN = "model.layers.1.mlp.down_proj.weight"
REFUSALS = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), [r"\*\.safetensors", "none"]),
    "lost shard": (_lost_shard, ["model-00001-of-00002.safetensors"]),
    "misplaced tensor": (_misplaced, ["model.nowhere.weight"]),
    "truncated file": (_truncated, ["model.safetensors"]),
    "missing tensor": (_edit_tensors(lambda state: state.pop(DOWN)), [DOWN, "missing"]),
    "missing head": (_edit_tensors(lambda state: state.pop("lm_head.weight")), ["lm_head.weight", "missing"]),
    "wrong shape": (
        _edit_tensors(lambda state: state.update({DOWN: torch.zeros(64, 95)})),
        [DOWN, r"\[64, 96\]", r"\[64, 95\]"],
    ),
    "short embedding": (
        _edit_tensors(lambda state: state.update({"model.embed_tokens.weight": torch.zeros(96, 64)})),
        ["model.embed_tokens.weight", r"\[97, 64\]", r"\[96, 64\]"],
    ),
    "unexpected tensor": (
        _edit_tensors(lambda state: state.update({"model.layers.1.mlp.gate.weight": torch.zeros(4, 64)})),
        ["model.layers.1.mlp.gate.weight", "Qwen3ForCausalLM"],
    ),
    "quantised": (_edit_config(quantization_config={"quant_method": "fp8"}), ["quantized"]),
    "mixture of experts": (_edit_config(num_experts=8), ["num_experts", "8"]),
    "dynamic rope": (
        _edit_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        ["rope_type", "dynamic"],
    ),
    "unknown model type": (_edit_config(model_type="not-a-model"), ["not-a-model"]),
    "drafter": (
        _edit_config(architectures=["DFlash2DraftModel"], dflash_config={"block_size": 4}),
        ["drafter", "DFlash2DraftModel"],
    ),
    "speculators drafter": (_edit_config(architectures=["X"], speculators_model_type="dflash2"), ["drafter"]),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_thing(tmp_path, saved, name):
    edit, parts = REFUSALS[name]
    shutil.copytree(saved("qwen3-untied"), tmp_path, dirs_exist_ok=True)
    edit(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Target.load(tmp_path, dtype="float32", device="cpu")
    for part in parts:
        assert caught.match(part)


def test_tap_beyond_the_model(saved):
    for tap in (3, -2):
        with pytest.raises(CheckpointError, match=rf"tap {tap}.*0 … 2"):
            Target.load(saved("qwen3"), dtype="float32", device="cpu", taps=(0, tap))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: Gemma2Config(**SHAPE, head_dim=16), "soft-cap|scaling"),
        (lambda: Gemma2Config(**SHAPE, head_dim=16, attn_logit_softcapping=None), "soft-cap|scaling"),
        (lambda: GraniteConfig(**SHAPE, embedding_multiplier=3.0), "not offered"),
        (lambda: GraniteConfig(**SHAPE, logits_scaling=2.0), "not offered"),
        (lambda: CohereConfig(**SHAPE, logit_scale=0.25), "not offered"),
    ],
    ids=["gemma2", "gemma2 without score caps", "granite embeddings", "granite logits", "cohere"],
)
def test_scaled_embeddings_and_capped_logits_are_refused(tmp_path, config, message):
    save_model(config(), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Target.load(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama-llama3", "qwen3", "mistral-window"])
def test_verifying_gives_the_bits_of_plain_decoding(saved, kind, dtype, attention_path):
    """Eight rows in one step equal eight steps of one row, bit for bit, across every boundary of the attention's tiles."""
    from dflash2_ray.models.attention import TILE

    target = Target.load(saved(kind), dtype=dtype, device="cpu")
    tokens = torch.randint(0, 97, (2 * TILE + 40,), generator=torch.Generator().manual_seed(5))
    pages = list(range(40))

    def step(cache, first, count):
        rows = torch.arange(first, first + count)
        hidden, _ = target.forward(
            tokens[rows], rows, AttentionBatch(rows, (Span(0, count, first + count, pages),), 8), cache
        )
        return target.logits(hidden)

    for first in (1, 3, 9, 14, 30, TILE - 8, TILE - 5, TILE, 2 * TILE - 4, 2 * TILE + 20):
        cache = target.allocate_cache(40, 8)
        step(cache, 0, first)
        together = step(cache, first, 8)
        one_by_one = torch.cat([step(cache, first + row, 1) for row in range(8)])
        assert torch.equal(together, one_by_one), first
