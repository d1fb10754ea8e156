"""The models with kernels in place of their CPU paths: the target's attention and store over one step, and a drafter's round."""

from pathlib import Path

import pytest
import torch

from dflash2_ray.core.draft_port import Commit, Open, Rows, RowSpan, Wanted
from dflash2_ray.models import attention, dflash2
from dflash2_ray.models.attention import TILE, attend, plan_attention, store
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.drafter_config import read_drafter_config
from dflash2_ray.models.target_ends import read_target_share
from dflash2_ray.runtime.draft_rounds import DraftRounds
from dflash2_ray.runtime.drafter_runner import DrafterRunner

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 8


def batch_of(spans):
    """Requests of (rows, kv_len) in shuffled pages."""
    order = torch.randperm(
        sum(-(-length // PAGE) for _, length in spans), generator=torch.Generator().manual_seed(0)
    ).tolist()
    made, slots, start = [], [], 0
    for rows, length in spans:
        pages = [order.pop() for _ in range(-(-length // PAGE))]
        made.append(Span(start, rows, length, pages))
        slots += [pages[i // PAGE] * PAGE + i % PAGE for i in range(length - rows, length)]
        start += rows
    return AttentionBatch(torch.tensor(slots), tuple(made), PAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 11])
def test_a_step_of_the_target(device, dtype, window, monkeypatch):
    """A long chunk of a prompt, verified drafts, plain decoding, and two rows that only pad the pass."""
    batch = batch_of([(40, 47), (5, 30), (1, 1), (1, 66)])
    generator = torch.Generator().manual_seed(1)
    num_rows, num_slots = len(batch.slots), 400
    cache = torch.randn(num_slots + TILE, 2, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    qkv = torch.randn(num_rows + 2, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator).to(dtype)

    def step(own_batch, own_cache, own_qkv):
        plan = plan_attention(own_batch, {window}, HEADS // KV_HEADS)
        store(plan, own_cache, own_qkv[:num_rows, HEADS:].unflatten(1, (2, KV_HEADS)))
        return plan, attend(plan, own_qkv[:, :HEADS], own_cache, 0.25, window)

    on_device = AttentionBatch(batch.slots.to(device), batch.spans, PAGE)
    stored = cache.to(device)
    plan, got = step(on_device, stored, qkv.to(device))
    assert plan.paged is not None
    monkeypatch.setattr(attention, "kernels_run", lambda device: False)
    plan, expected = step(batch, cache, qkv)
    assert plan.paged is None
    assert torch.equal(stored.cpu(), cache)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_a_step_of_the_drafter(device):
    """The embedded drafter proposes the same, its contexts in pages or in buffers, whoever walks: greedy, sampled and matching requests in one pass."""
    assets = Path(dflash2.__file__).parents[1] / "assets"
    config = read_drafter_config(assets / "drafter")
    share = read_target_share(assets / "target", dtype="float32", device=device)
    drafter = dflash2.load_drafter(assets / "drafter", config, share, dtype="float32", device=device)
    rows = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(device)
    lengths = {"greedy": 4, "sampled": 2, "matching": 3}

    def proposals(rounds):
        runner = DrafterRunner(drafter, max_num_requests=3, rounds=rounds)
        first = 0
        for seed, (name, length) in enumerate(lengths.items(), 2**64 - 2):
            temperature = 0.0 if name == "greedy" else 0.9
            span = RowSpan(name, 1, 0, length)
            runner.apply([
                Open(name, 1, temperature, seed % 2**64, name == "matching"),
                Rows((span,), rows[first : first + length]), Commit(name, 1, length, 7),
            ])  # fmt: skip
            first += length
        return runner.propose([Wanted(name, 1, length, 3) for name, length in lengths.items()])

    got = proposals(
        DraftRounds(
            drafter, drafter.new_pages(6, 4), max_num_requests=3, num_block_rows=4, num_positions=64, backend=None
        )
    )
    expected = proposals(None)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert [one.candidate_probs is None for one in got] == [True, False, True]
    assert torch.equal(got[1].candidate_ids, expected[1].candidate_ids)
    torch.testing.assert_close(got[1].candidate_probs, expected[1].candidate_probs, atol=1e-5, rtol=1e-4)
