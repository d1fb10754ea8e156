"""deploy/http_overhead.py measures on a real service: every way gives as many tokens as were asked for, in a time that was not zero."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "deploy/http_overhead.py"


def test_every_way_is_measured(idle, engine, monkeypatch):
    from dflash2_ray import Client

    spec = importlib.util.spec_from_file_location("http_overhead", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    counted = []

    async def rate_of(one, ids, concurrency):
        counted.append([await one(prompt) for prompt in ids])
        return await measured(one, ids, concurrency)

    measured = module.rate_of
    monkeypatch.setattr(module, "rate_of", rate_of)
    rates = module.measure(engine, Client(), idle.url, [[5, 6], [7]], new_tokens=3, concurrency=2, repeats=1)
    assert list(rates) == ["LLM", "Client", "HTTP, whole", "HTTP, streamed"]
    assert all(len(turns) == 1 and turns[0] > 0 for turns in rates.values())
    assert counted == [[3, 3]] * 6  # three ways with tokens to count, two turns
