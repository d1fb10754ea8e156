"""Real models for the end-to-end proofs: the embedded pair in fp32, and a tiny random pair whose laws can be enumerated."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dflash2_ray

ASSETS = Path(dflash2_ray.__file__).parent / "assets"
SEED = 20261201


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prompts():
    """At least 200 prompts of many kinds, as token ids of the embedded tokenizer (chat ones in its template)."""
    from dflash2_ray.text.chat_template import ChatTemplate
    from dflash2_ray.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(ASSETS / "target")
    template = ChatTemplate.from_folder(ASSETS / "target")
    kinds = json.loads((ASSETS / "prompts.json").read_text())
    ids = [
        tokenizer.encode(template.render([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in kinds["chat"]
    ]
    ids += [tokenizer.encode(text) for kind, texts in kinds.items() if kind != "chat" for text in texts]
    return [one[:400] for one in ids]


@pytest.fixture(scope="session")
def embedded():
    """Builds an `LLM` on the embedded pair in fp32, at full draft width if not told otherwise (what is compared must not follow
    the load of the machine); engines are kept for the session by their settings. seed=None: unseeded requests follow the
    standard rule, with noise that is the same in every session."""
    from dflash2_ray import LLM

    engines = {}

    def build(**settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in engines:
            engines[key] = LLM(dtype="float32", **{"seed": SEED, "draft_width": "fixed", **settings})
            engines[key]._loop._salt = str(SEED)
        return engines[key]

    yield build
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def hf_target():
    """The embedded target under transformers, untouched, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hf_drafter():
    """The embedded drafter in the official package, fp32."""
    from dflash.model import DFlash2DraftModel

    return DFlash2DraftModel.from_pretrained(ASSETS / "drafter", dtype=torch.float32).eval()


def build_tiny_pair(folder, *, vocab_size=8, mask_token_id=7, candidates=4, sharpness=12, eos_token_id=None):
    """Write a random target and a random drafter. sharpness: scale of the logits; the flatter the laws, the more they overlap."""
    from dflash.model import DFlash2DraftModel
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    settings = Qwen3Config(**shape, num_hidden_layers=3, tie_word_embeddings=False, eos_token_id=eos_token_id)
    target = Qwen3ForCausalLM(settings)
    with torch.no_grad():
        target.lm_head.weight.mul_(sharpness)
        target.model.embed_tokens.weight.mul_(20)
    target.save_pretrained(folder / "target")
    tokenizer = json.loads((ASSETS / "target" / "tokenizer.json").read_text())
    (folder / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    method = {
        "block_size": 4,
        "mask_token_id": mask_token_id,
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": candidates,
    }
    config = Qwen3Config(
        **shape, num_hidden_layers=1, architectures=["DFlash2DraftModel"], dflash_config=method, num_target_layers=3
    )
    drafter = DFlash2DraftModel(config)
    with torch.no_grad():
        for layer in drafter.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                conv.base_kernel.normal_(0, 0.3)
                conv.base_kernel[:, 0] += 1
        for table in (drafter.candidate_selector.predecessor_codebook, drafter.candidate_selector.successor_codebook):
            table.weight.normal_(0, 0.5)
    (folder / "drafter").mkdir()
    save_file({k: v.contiguous() for k, v in drafter.state_dict().items()}, folder / "drafter" / "model.safetensors")
    raw = config.to_dict() | {"architectures": ["DFlash2DraftModel"], "dflash_config": method, "model_type": "qwen3"}
    (folder / "drafter" / "config.json").write_text(json.dumps(raw, default=str))
    return SimpleNamespace(target=str(folder / "target"), drafter=str(folder / "drafter"), hf_target=target.eval())


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """A random target with a vocabulary of 8 and a random drafter: flat laws overlap, so drafts are accepted."""
    return build_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def text_pair(tmp_path_factory):
    """A tiny pair whose tokens 4 … 11 are letters of a text that a grammar can ask for, and 2 ends one; its drafts go far."""
    folder = tmp_path_factory.mktemp("text_pair")
    return build_tiny_pair(folder, vocab_size=12, mask_token_id=3, candidates=12, sharpness=7, eos_token_id=2)
