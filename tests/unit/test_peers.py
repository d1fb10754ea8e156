"""The script that compares engines still drives them; vLLM only where it is installed."""

import importlib.util
from pathlib import Path

import pytest

from dflash2_ray.models.source import locate

PATH = Path(__file__).parents[2] / "deploy/peers.py"
NAMES = ["dflash2_ray", "transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_peers_are_measured(peers, name, capsys):
    rates = peers.measure(name, str(locate("embedded")), (1,), repeats=2, new_tokens=4)
    assert list(rates) == [1]
    assert len(rates[1]) == 2
    assert min(rates[1]) > 0
    assert ("outside the model" in capsys.readouterr().out) == (name == "dflash2_ray")
