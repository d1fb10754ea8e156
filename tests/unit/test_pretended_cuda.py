"""The engine where both models live on a GPU (`pretended_cuda`): no tensor meets one of another device, whoever it comes from, and the
host waits for the device no more often per step than is stated here."""

import functools
import threading

import pytest
import torch
from pretended_cuda import PretendedTensor

from dflash2_kernels.backend import Operator
from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime import build
from dflash2_ray.runtime.draft_link import RemoteDraftPort
from dflash2_ray.runtime.drafter_server import DrafterServer

PROMPT = tuple(range(40, 60))
KINDS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "drawn too": {"temperature": 0.9, "top_p": 0.8},
    "seeded": {"temperature": 0.8, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "shaped": {
        "temperature": 0.7, "seed": 6, "presence_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": {7: 1.0}, "logprobs": 2,
        "min_tokens": 2, "prompt_logprobs": 1,
    },
}  # fmt: skip
# kind: (reads, uploads) of one request's decode step at most, draft included; kernels' own waits are not in it
MOST_WAITS = {"greedy": (2, 0), "drawn": (2, 0), "drawn too": (2, 0), "seeded": (2, 3), "shaped": (6, 16)}


@pytest.fixture
def references(gpu, monkeypatch):
    """No triton on this machine with a GPU."""
    monkeypatch.setattr(Operator, "has_kernel", lambda self, device: False)


@pytest.fixture
def start(gpu, monkeypatch):
    ends = []

    def build_loop(transport=None):
        """With a transport: a drafter of its own behind it."""
        config = ServiceConfig.from_keys({
            "target": "embedded", "dtype": "float32", "device": "cuda", "max_num_seqs": 4, "num_kv_pages": 200, "max_model_len": 256,
            "draft_width": "fixed", "cuda_graphs": "off", "drafter_placement": "separate" if transport else "colocated", "draft_deadline_ms": 60_000,
        })  # fmt: skip
        blueprint = build.draw_blueprint(config)
        if transport:
            monkeypatch.setattr(build, "RemoteDraftPort", functools.partial(RemoteDraftPort, transport=transport))
        loop = build.build_from_blueprint(blueprint, config)
        ends.append(loop.close)
        if transport:
            server = DrafterServer(build.build_drafter_runner(blueprint), "secret")
            thread = threading.Thread(target=server.serve, daemon=True)
            thread.start()
            ends.extend([server.stop, functools.partial(thread.join, 60)])
            loop.draft_port.connect(server.address)
        return loop

    yield build_loop
    for end in ends:
        end()


def run(loop, kinds, speculative=True, on_step=lambda step: None):
    """The texts by kind; all requests at once."""
    for kind in kinds:
        params = SamplingParams.from_keywords(max_tokens=8, ignore_eos=True, **KINDS[kind])
        loop.add(RequestSpec(kind, PROMPT, params))
    loop.control.force(loop.control.max_width if speculative else 0)
    texts = {kind: [] for kind in kinds}
    step = 0
    while loop.has_work:
        for delta in loop.step():
            assert delta.finish_reason != "error", delta.error
            texts[delta.request_id] += delta.token_ids
        on_step(step)
        step += 1
    return texts


def check_texts(loop):
    assert isinstance(loop.runner.cache.layers[0], PretendedTensor)
    drafted = run(loop, KINDS)
    assert loop.spec_counters.acceptance_length > 1, "nothing was drafted"
    plain = run(loop, KINDS, speculative=False)
    for kind in KINDS:
        assert len(drafted[kind]) == 8
        assert kind.startswith("drawn") or drafted[kind] == plain[kind]
    assert not {"failed_drafts", "num_lost", "num_failed_asks"} & {
        name for name, count in loop.draft_port.counters().items() if count
    }


@pytest.mark.parametrize("transport", ["socket", "gloo"])
def test_a_separate_drafter_meets_its_rows_on_the_device(transport, kernels, start):
    check_texts(start(transport))


def test_without_kernels_too(references, start):
    check_texts(start("socket"))


def test_colocated_and_how_often_a_step_waits(gpu, kernels, start):
    loop = start()
    check_texts(loop)
    found = {}
    together = ("drawn", "greedy", "drawn too")
    for kinds in (*([kind] for kind in KINDS), together):
        seen = []

        def note(step, seen=seen):
            if step > 0:  # the first one takes the prompt in
                seen.append((gpu.count("reads"), gpu.count("uploads")))
            gpu.waits.clear()

        run(loop, kinds, on_step=note)
        assert len(seen) > 1
        found[" and ".join(kinds)] = tuple(max(column) for column in zip(*seen, strict=True))
    assert found.pop(" and ".join(together)) == MOST_WAITS["drawn"], "more requests, more waits"
    assert found == MOST_WAITS


def test_the_pretended_device_has_the_rules_of_a_real_one(gpu):
    here, there = torch.ones(3, 4), torch.ones(3, 4).to("cuda")
    assert there.device.type == "cuda"
    refused = (
        lambda: there + here, lambda: there.add_(here), lambda: torch.cat([there, here]), lambda: there.index_select(0, torch.tensor([1])),
        lambda: here[torch.tensor([1], device="cuda")], lambda: there.numpy(), lambda: there.where(here > 0, there),
    )  # fmt: skip
    for mix in refused:
        with pytest.raises((RuntimeError, TypeError), match="device"):
            mix()
    gpu.waits.clear()
    there[1:] = 2.0
    assert (there * torch.tensor(2.0)).cpu().tolist() == [[2.0] * 4, [4.0] * 4, [4.0] * 4]
    assert (gpu.count("reads"), gpu.count("uploads")) == (1, 0)
    there[:, [0, 1]] = here[:, :2]
    assert float(there.sum()) == 16.0
    assert (gpu.count("reads"), gpu.count("uploads")) == (2, 2)
