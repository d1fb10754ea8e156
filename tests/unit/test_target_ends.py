"""A drafter in a process of its own borrows exactly what one beside its target does."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.target import Target
from dflash2_ray.models.target_ends import read_target_share

V, H = 37, 32


@pytest.fixture(params=[True, False], ids=["tied", "own head"])
def folder(request, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        hidden_size=H, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=V,
        max_position_embeddings=64, num_hidden_layers=2, tie_word_embeddings=request.param,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_the_loaded_target_shares_it(folder, dtype):
    loaded = Target.load(folder, dtype=dtype, device="cpu").share()
    alone = read_target_share(folder, dtype=dtype, device="cpu")
    hidden = torch.randn(5, H)
    assert torch.equal(alone.embedding, loaded.embedding)
    assert torch.equal(alone.head_weight, loaded.head_weight)
    assert torch.equal(alone.head(hidden), loaded.head(hidden))
    assert alone.embedding.dtype == loaded.embedding.dtype == getattr(torch, dtype)
    assert (alone.vocab_size, alone.hidden_size, alone.num_layers) == (V, H, 2)


def test_missing_and_doubled_embeddings(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"left.embed_tokens.weight": embedding, "right.embed_tokens.weight": embedding.clone()}, path)
    with pytest.raises(CheckpointError, match=r"expected one tensor named …embed_tokens\.weight, got 2"):
        read_target_share(folder, dtype="float32", device="cpu")
    save_file(tensors | {"model.embed_tokens.weight": embedding[:, :8].contiguous()}, path)
    with pytest.raises(CheckpointError, match=r"expected shape \[37, 32\], got \[37, 8\]"):
        read_target_share(folder, dtype="float32", device="cpu")
