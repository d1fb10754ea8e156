"""A tiny drafter with a windowed layer on disk, and drafter processes that tests may kill, stop and hold back."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash2_ray.models.drafter_checkpoint import expected_shapes
from dflash2_ray.models.drafter_config import read_drafter_config

SCRIPT = Path(__file__).with_name("drafter_process.py")
V, H = 61, 32
CONFIG = {
    "architectures": ["DFlash2DraftModel"], "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": V, "max_position_embeddings": 1024,
    "rope_theta": 1000.0, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "is_causal": False,
    "dflash_config": {
        "block_size": 4, "mask_token_id": 60, "target_layer_ids": [1], "conv_kernel_size": 2, "conv_group_size": 8,
        "selector_rank": 4, "selector_top_k": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_drafter")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(4)
    state = {}
    for name, shape in expected_shapes(read_drafter_config(folder)).items():
        scale = 1.0 if "codebook" in name else shape[-1] ** -0.5
        state[name] = torch.randn(shape, generator=generator) * scale + name.endswith("norm.weight")
    save_file(state, folder / "model.safetensors")
    torch.save((torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)), folder / "share.pt")
    return str(folder)


@pytest.fixture(scope="session")
def drafter(tiny_folder):
    """The same drafter in this process, for reference."""
    spec = importlib.util.spec_from_file_location("drafter_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tiny_drafter(tiny_folder)


class DrafterProcess:
    """`address`: of its server. A line of its output is why a target left."""

    def __init__(self, options):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.address = None

    def wait_until_ready(self):
        line = self.process.stdout.readline()
        assert line, f"the drafter process ended with {self.process.wait()}"
        self.address = json.loads(line)
        return self

    def release(self, num_drafts=1):
        self.process.stdin.write("\n" * num_drafts)
        self.process.stdin.flush()

    def next_reason(self):
        return json.loads(self.process.stdout.readline())

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """SIGSTOP; returns once the process stands still."""
        self.signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start_drafter(tiny_folder):
    """`start_drafter(**options)` → a ready process; several at once with `together`."""
    started = []

    def start(together=1, **options):
        fresh = [DrafterProcess({"folder": tiny_folder} | options) for _ in range(together)]
        started.extend(fresh)
        for one in fresh:
            one.wait_until_ready()
        return fresh[0] if together == 1 else fresh

    yield start
    for one in started:
        if one.process.poll() is None:
            one.signal(signal.SIGCONT)
            one.kill()
