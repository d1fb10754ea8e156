"""A target over several processes: the logits of one, the same bits on every rank, its own half of the weights only; a rank that
dies or hangs is found out (cases B29, B30, B31)."""

import os
import signal

import pytest
import torch
from ranks import on_ranks, start_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.target import Target
from dflash2_ray.models.tensor_files import TensorFiles

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=8, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
}
ROWS, PAGE = 21, 4
COUNTS = (1, 3, 8, 40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if value.dim() == 1:
                    value.normal_(1 if "norm" in key else 0, 0.2)
                else:
                    value.normal_(0, 1.2 * value.shape[1] ** -0.5)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def run(target, ids, pieces):
    """Logits of all rows, computed in passes of the given lengths."""
    cache = target.allocate_cache(-(-len(ids) // PAGE), PAGE)
    rows, start = [], 0
    for count in pieces:
        slots = torch.arange(start, start + count)
        span = Span(0, count, start + count, range(-(-(start + count) // PAGE)))
        hidden, _ = target.forward(
            torch.tensor(ids[start : start + count]), slots, AttentionBatch(slots, (span,), PAGE), cache
        )
        rows.append(target.logits(hidden))
        start += count
    return torch.cat(rows)


def _everything(shard, folders, ids):
    """What every model gives on this rank, and some sums: processes are dear to start."""
    results = {}
    for name, folder in folders.items():
        read, whole = [], TensorFiles.read

        def counted(self, *arguments, whole=whole, read=read, **options):
            tensor = whole(self, *arguments, **options)
            read.append(tensor.numel())
            return tensor

        TensorFiles.read = counted
        target = Target.load(folder, dtype="float32", device="cpu", shard=shard)
        TensorFiles.read = whole
        logits = [run(target, ids, pieces).numpy() for pieces in ([ROWS], [8, *[1] * 5, 8])]
        results[name] = (logits, sum(read), target.num_fused_layers)
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(shard.rank))
    return results, [shard.total(x[:count].clone()).numpy() for count in COUNTS]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, folders):
    ids = torch.randint(0, 259, (ROWS,), generator=torch.Generator().manual_seed(1)).tolist()
    return request.param, ids, on_ranks(request.param, _everything, folders, ids)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_rank(folders, ranks, name):
    size, ids, results = ranks
    expected = run(Target.load(folders[name], dtype="float32", device="cpu"), ids, [ROWS])
    (whole, stepped), _, fused = results[0][0][name]
    torch.testing.assert_close(torch.from_numpy(whole), expected, rtol=1e-4, atol=1e-4)
    assert (whole == stepped).all(), "a row's bits depend on how many rows share its pass"
    assert fused == 2
    assert all(result[0][name][0][0].shape[1] == 0 for result in results[1:])
    parameters = sum(torch.tensor(shape).prod().item() for shape in TensorFiles(folders[name]).shapes.values())
    share = max(result[0][name][1] for result in results) / parameters
    assert share < (0.6 if size == 2 else 0.4), (
        "a rank reads more than its part"
    )  # norms and replicated KV heads are whole


def test_sums_are_the_same_on_every_rank_and_for_any_number_of_rows(ranks):
    _, _, results = ranks
    for _, sums in results:
        for count, one in zip(COUNTS, sums, strict=True):
            assert (one == results[0][1][-1][:count]).all()


@pytest.mark.parametrize(("how", "size"), [(signal.SIGKILL, 2), (signal.SIGKILL, 3), (signal.SIGSTOP, 2)])
def test_a_lost_rank_is_found_out(how, size):
    processes, pipes, store = start_ranks(size, _add_for_ever, timeout_s=3.0)
    try:
        os.kill(processes[-1].pid, how)
        assert pipes[0].poll(120)
        kind, message = pipes[0].recv()
        assert kind == "UnitLost", message
        assert "collective" in message or "did not come together" in message
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _add_for_ever(shard):
    while True:
        shard.total(torch.ones(5, 7))
