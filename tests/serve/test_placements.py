"""Every placement and schedule answers like one process: {colocated, separate} × ranks × {serial, split} × requests in flight; and
Ray is not called per step."""

import asyncio

import pytest

PROMPTS = [
    "Once upon a time",
    "def add(a, b):\n",
    "import os",
    "The capital of France",
    "1 2 3 4 5",
    "SELECT * FROM",
    "A recipe for",
    "In the beginning",
]
SAMPLING = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}]
NUM_TOKENS = 32
SHAPES = [(placement, size, "serial") for placement in ("colocated", "separate") for size in (1, 2, 4)]
SHAPES += [("separate", size, "split") for size in (1, 2, 4)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def placed(request, service):
    """A client of a unit with this placement, number of ranks and schedule."""
    from ray import serve

    from dflash2_ray import Client
    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    placement, size, pipeline = request.param
    settings = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "seed": 7,
        "num_kv_pages": 400,
        "drafter_placement": placement,
        "tensor_parallel_size": size,
        "pipeline": pipeline,
        "draft_width": "fixed",
        "draft_deadline_ms": 20000,
    }
    serve.run(app(ServiceConfig(**settings)), name="placed", route_prefix="/placed")
    yield Client("placed"), request.param
    serve.delete("placed")


@pytest.fixture(scope="module")
def expected(engine):
    return [
        engine.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING[index % 2])[0].token_ids
        for index, prompt in enumerate(PROMPTS)
    ]


def test_answers_are_those_of_one_process(placed, expected):
    client, (placement, size, pipeline) = placed

    async def one(index):
        (generation,) = await client.agenerate(
            PROMPTS[index], max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING[index % 2]
        )
        return generation

    async def together():
        return await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))

    alone = [asyncio.run(one(index)) for index in range(3)]
    company = asyncio.run(together())
    assert [generation.token_ids for generation in alone] == expected[:3]
    assert [generation.token_ids for generation in company] == expected
    for group in (alone, company):
        assert sum(one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for one in group) > 0
        assert all(one.metrics["speculative_decoding"]["num_plain_steps"] == 0 for one in group)
    info = asyncio.run(client.describe())
    assert info["config"]["tensor_parallel_size"] == size
    assert info["config"]["drafter_placement"] == placement
    assert info["config"]["pipeline"] == pipeline
    roles = [row["role"] for row in info["workers"]]
    assert roles == [
        "unit",
        *(f"target rank {rank}" for rank in range(size)),
        *(["drafter"] if placement == "separate" else []),
    ]
    assert len({row["pid"] for row in info["workers"]}) == len(roles)
    assert info["num_dropped_proposals"] == 0


def test_ray_is_not_called_per_step(placed):
    client, _ = placed
    before = asyncio.run(client.describe())
    client.generate(PROMPTS[0], temperature=0, max_tokens=64, ignore_eos=True, num_speculative_tokens=1)
    after = asyncio.run(client.describe())
    assert after["num_steps"] - before["num_steps"] >= 32
    calls = {
        row["role"]: row["num_calls"] - earlier["num_calls"]
        for row, earlier in zip(after["workers"], before["workers"], strict=True)
    }
    own = {"unit": 2}  # the request, and this second description
    assert calls == {role: own.get(role, 0) for role in calls} | {"target rank 0": 1}
