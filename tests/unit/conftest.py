"""A scripted target and drafter for the step loop: exact, fast, and strict about pages and context rows.

The scripted target's KV cache holds the token of each slot. The next token is a hash of the whole prefix *as read back
from the pages*, so a page that was overwritten, freed too early or shared changes the text. The scripted drafter checks
that the context rows it gets are the committed tokens at the right positions, and proposes the target's own
continuation with chosen slots spoiled.
"""

import hashlib
import time
from types import SimpleNamespace

import pytest
import torch

from dflash2_kernels import selector_walk
from dflash2_kernels.backend import Operator
from dflash2_ray.config import EngineConfig, MachineFacts
from dflash2_ray.core.draft_port import Close, Commit, Open, Proposal, Rows
from dflash2_ray.core.ledger import Ledger
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.models import attention, dflash2, fused_layer, paged_plan
from dflash2_ray.runtime import build, rejection_launch
from dflash2_ray.runtime.target_loop import TargetLoop
from dflash2_ray.runtime.target_runner import TargetRunner

VOCAB = 259
KERNELS = (  # where the models call an operator whose reference is more than a few launches
    (paged_plan, "paged_attention"), (attention, "kv_store"), (fused_layer, "add_rms_norm"), (dflash2, "add_rms_norm"),
    (dflash2, "grouped_conv"), (dflash2, "vocab_topk"), (dflash2, "kv_store"), (dflash2, "paged_attention"), (dflash2, "store_context"),
    (selector_walk, "selector_walk"), (rejection_launch, "sparse_rejection"),
)  # fmt: skip


def next_token(prefix):
    """The scripted language: a hash of the whole prefix."""
    digest = hashlib.blake2b(repr(list(prefix)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def continuation(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ScriptedTarget:
    """Stands in for `models.target.Target`."""

    device = "cpu"
    facts = SimpleNamespace(vocab_size=VOCAB)

    def allocate_cache(self, num_pages, page_size):
        return torch.full((num_pages * page_size,), -1, dtype=torch.int64)

    def forward(self, ids, positions, batch, cache):
        cache[batch.slots] = ids
        hidden = torch.zeros(len(ids), 1)
        for span in batch.spans:
            slots = [
                span.page_ids[p // batch.page_size] * batch.page_size + p % batch.page_size for p in range(span.kv_len)
            ]
            prefix = cache[torch.tensor(slots)].tolist()
            for row in range(span.num_rows):
                seen = prefix[: span.kv_len - span.num_rows + row + 1]
                hidden[span.row_start + row, 0] = next_token(seen)
        return hidden, torch.stack([ids, positions], dim=1).float()

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float() * 20


class ScriptedDrafter:
    """A DraftPort whose proposals are right except where `spoil(request_id, base_len, slot)` says so."""

    connected = True
    last_transfer_s = 0.0

    def __init__(self, spoil=lambda request_id, base_len, slot: False):
        self.ledger = Ledger()
        self.spoil = spoil
        self.contexts = {}
        self.num_proposed = 0

    def send(self, messages):
        pending = {}
        for message in messages:
            if isinstance(message, Open):
                self.contexts[message.request_id] = SimpleNamespace(epoch=message.epoch, tokens=[], anchor=None)
                assert message.first_position == 0
            elif isinstance(message, Rows):
                offset = 0
                for span in message.spans:
                    first, rows = pending.setdefault((span.request_id, span.epoch), (span.first_position, []))
                    assert span.first_position == first + len(rows), "rows come in order"
                    rows += message.rows[offset : offset + span.num_rows].tolist()
                    offset += span.num_rows
                assert offset == message.rows.shape[0]
            elif isinstance(message, Commit):
                context = self.contexts[message.request_id]
                assert message.epoch == context.epoch
                first, rows = pending[message.request_id, message.epoch]
                assert first == len(context.tokens), "context rows have a gap"
                for token, position in rows:
                    if position < message.base_len:
                        assert position == len(context.tokens)
                        context.tokens.append(int(token))
                assert len(context.tokens) == message.base_len
                context.anchor = message.anchor
            elif isinstance(message, Close):
                assert self.contexts.pop(message.request_id).epoch == message.epoch

    def ask(self, wanted):
        pass

    def collect(self, wanted, deadline_s=None):
        proposals = []
        for want in wanted:
            context = self.contexts[want.request_id]
            assert (context.epoch, len(context.tokens)) == (want.epoch, want.base_len)
            drafts = continuation([*context.tokens, context.anchor], want.width)
            for slot in range(want.width):
                if self.spoil(want.request_id, want.base_len, slot):
                    drafts[slot] = (drafts[slot] + 1) % VOCAB
            proposals.append(Proposal(want.request_id, want.epoch, want.base_len, tuple(drafts)))
            self.num_proposed += 1
        return proposals

    def counters(self):
        return {}

    def close(self):
        self.contexts.clear()


PATTERNS = {
    "ALL": lambda request_id, base_len, slot: False,
    "NONE": lambda request_id, base_len, slot: slot == 0,
    "P1": lambda request_id, base_len, slot: slot == 1,
    "P2": lambda request_id, base_len, slot: slot == 2,
    "MIX": lambda request_id, base_len, slot: (base_len * 7 + len(request_id)) % 4 == slot,
}


def make_loop(drafter=None, *, eos=(), loop_class=TargetLoop, clock=time.perf_counter, **settings):
    values = {
        "target": "scripted",
        "drafter": "scripted" if drafter else None,
        "served_model_name": "scripted",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 64,
        "tensor_parallel_size": 1,
        "drafter_placement": "colocated",
        "num_speculative_tokens": 3 if drafter else 0,
        "draft_width": "fixed",
        "draft_deadline_ms": None,
        "pipeline": "serial",
        "step_timeout_s": 30.0,
        "cuda_graphs": False,
        "page_size": 4,
        "num_kv_pages": 64,
        "enable_prefix_caching": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_queued_requests": 64,
        "seed": 0,
        "drafter_max_model_len": 64,
        "drafter_window": None,
        "kv_bytes": 0,
    }
    values.update(settings)
    config = EngineConfig(**values)
    runner = TargetRunner(
        ScriptedTarget(),
        torch.nn.Identity() if drafter else None,
        num_pages=config.num_kv_pages,
        page_size=config.page_size,
    )
    return loop_class(config, runner, drafter, eos_token_ids=frozenset(eos), vocab_size=VOCAB, clock=clock)


def spec(request_id, prompt, **params):
    params.setdefault("temperature", 0.0)
    return RequestSpec(request_id, tuple(prompt), SamplingParams.from_keywords(**params))


def run(loop, specs=(), on_step=None):
    """Add specs, step until idle; returns {request_id: (token_ids, last delta)}."""
    results = {}
    for one in specs:
        loop.add(one)
    step = 0
    while loop.has_work:
        for delta in loop.step():
            tokens, _ = results.get(delta.request_id, ([], None))
            results[delta.request_id] = (tokens + list(delta.token_ids), delta)
        step += 1
        if on_step:
            on_step(step)
        assert step < 10_000, "the loop does not come to an end"
    return results


def computed(loop):
    """Rows of every pass, as they come."""
    rows = []
    forward = loop.runner.forward

    def counting(batch):
        rows.append(len(batch.token_ids))
        return forward(batch)

    loop.runner.forward = counting
    return rows


@pytest.fixture
def scripted():
    """The scripted parts, as one namespace."""
    return SimpleNamespace(
        VOCAB=VOCAB,
        next_token=next_token,
        continuation=continuation,
        Target=ScriptedTarget,
        Drafter=ScriptedDrafter,
        PATTERNS=PATTERNS,
        make_loop=make_loop,
        spec=spec,
        run=run,
        computed=computed,
    )


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU without any kernel."""
    from pretended_cuda import pretended_cuda

    monkeypatch.setattr(build, "read_machine_facts", lambda: MachineFacts(1, 8 << 30, 8 << 30))

    def checked(self, *tensors):
        assert len({one.device for one in tensors}) == 1, f"{self.name}: tensors on {[one.device for one in tensors]}"
        return False

    monkeypatch.setattr(Operator, "uses_kernel", checked)
    with pretended_cuda() as present:
        yield present


@pytest.fixture
def kernels(gpu, monkeypatch):
    """The models lay their operands out for kernels; the references stand in for these, uncounted, each as one launch."""
    monkeypatch.setattr(Operator, "has_kernel", lambda self, device: torch.device(device).type == "cuda")
    gpu.uncounted = "dflash2_kernels"
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, gpu.kernel(getattr(module, name)))
