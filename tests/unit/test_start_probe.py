"""The generation before a unit is ready: it leaves no trace, and it finds a drafter that is not this target's."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dflash2_ray
from dflash2_ray.config import ServiceConfig
from dflash2_ray.errors import ConfigError
from dflash2_ray.runtime.build import build_target_loop
from dflash2_ray.runtime.start_probe import NUM_TOKENS, StartProbe, judge, start_probe

KEYS = {"dtype": "float32", "max_num_seqs": 2, "seed": 1, "draft_width": "fixed"}
PROMPT = tuple(range(40, 80))


@pytest.fixture
def build():
    """build(**keys): a loop of the embedded pair."""
    loops = []

    def one(**keys):
        loops.append(build_target_loop(ServiceConfig.from_keys({**KEYS, **keys})))
        return loops[-1]

    yield one
    for loop in loops:
        loop.close()


def test_a_fitting_drafter(build):
    loop = build()
    probe = start_probe(loop, PROMPT)
    assert probe.num_tokens == NUM_TOKENS
    assert probe.acceptance_length > 1.2
    assert start_probe(loop, PROMPT).acceptance_length == probe.acceptance_length
    assert (loop.num_steps, loop.spec_counters.num_drafts, loop.has_work) == (0, 0, False)
    assert loop.pool.num_free == loop.pool.num_pages


def test_a_drafter_of_another_target(build, caplog, tmp_path):
    """Every shape fits; what it makes of the target's features is noise."""
    shutil.copytree(Path(dflash2_ray.__file__).parent / "assets/drafter", tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    weights["fc.weight"] = torch.randn_like(weights["fc.weight"])
    save_file(weights, tmp_path / "model.safetensors")
    probe = start_probe(build(drafter=str(tmp_path)), PROMPT)
    assert probe.acceptance_length < ServiceConfig().acceptance_floor
    with pytest.raises(ConfigError, match=r"accepted for 1\.\d\d tokens per step.*acceptance_floor=1\.1"):
        judge(probe, ServiceConfig(startup_probe="refuse"))
    with caplog.at_level(logging.WARNING):
        judge(probe, ServiceConfig())
    assert "is this the drafter of this target?" in caplog.text


def test_without_a_drafter(build, caplog):
    probe = start_probe(build(drafter="none"), PROMPT)
    assert (probe.num_tokens, probe.acceptance_length) == (NUM_TOKENS, None)
    judge(probe, ServiceConfig(startup_probe="refuse"))
    assert not caplog.text


def test_a_short_context(build):
    assert start_probe(build(max_model_len=24), PROMPT).num_tokens == 12


@pytest.mark.parametrize(("length", "refused"), [(1.99, True), (2.0, False), (5.0, False)])
def test_the_floor(length, refused):
    config = ServiceConfig(startup_probe="refuse", acceptance_floor=2.0)
    if refused:
        with pytest.raises(ConfigError, match="acceptance_floor=2"):
            judge(StartProbe(48, 0.1, length), config)
    else:
        judge(StartProbe(48, 0.1, length), config)
