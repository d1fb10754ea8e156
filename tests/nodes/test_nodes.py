"""A unit over several nodes: the drafter away from the target, ranks apart on request, and a node that goes away."""

import asyncio
import time

import pytest
from ports import free_ports

PROMPTS = ["Once upon a time", "def add(a, b):\n", "import os", "1 2 3 4 5"]
COMMON = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "seed": 7,
    "num_kv_pages": 300,
    "drafter_placement": "separate",
    "draft_width": "fixed",
}
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False},
    )
    nodes = {
        name: cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20, labels={"role": role})
        for name, role in (("targets", "target"), ("drafters", "draft"), ("spare", "target"))
    }
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace="nodes", log_to_driver=False)
    (port,) = free_ports(1)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield cluster, nodes
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def expected():
    from dflash2_ray import LLM

    engine = LLM(dtype="float32", max_num_seqs=4, seed=7)
    tokens = [one.token_ids for one in engine.generate(PROMPTS, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)]
    engine.close()
    return tokens


def deployed(name, **settings):
    from ray import serve

    from dflash2_ray import Client
    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    serve.run(app(ServiceConfig.from_keys({**COMMON, **settings})), name=name, route_prefix=f"/{name}")
    client = Client(name)

    def describe(condition, patience_s=120):
        deadline = time.monotonic() + patience_s
        while True:
            try:
                info = asyncio.run(client.describe())
                if condition(info):
                    return info
            except Exception as error:  # no unit is ready
                info = error
            assert time.monotonic() < deadline, f"still {info}"

    return client, describe


def homes(info):
    return {row["role"]: row["node_id"] for row in info["workers"] if "node_id" in row}


def answers(client):
    results = client.generate(PROMPTS, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert sum(one.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for one in results) > 0
    return [one.token_ids for one in results]


def test_drafter_on_another_node_and_the_loss_of_the_targets_node(cluster, expected):
    from ray import serve

    ray_cluster, nodes = cluster
    labels = {"target_labels": "role=target", "drafter_labels": "role=draft"}
    client, describe = deployed("apart", tensor_parallel_size=2, **labels)
    before = describe(lambda info: info["degraded"] == [])
    home = homes(before)
    assert home["target rank 0"] == home["target rank 1"] != home["drafter"]
    assert home["drafter"] == nodes["drafters"].node_id
    assert answers(client) == expected
    lost = next(node for node in nodes.values() if node.node_id == home["target rank 0"])
    stream = client.stream(PROMPTS[0], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    chunks = [next(stream)]
    ray_cluster.remove_node(lost)
    chunks += list(stream)
    assert chunks[-1].generation.token_ids == expected[0]
    after = describe(lambda info: info["degraded"] == [] and homes(info)["target rank 0"] != lost.node_id)
    assert homes(after)["target rank 0"] == homes(after)["target rank 1"]
    assert answers(client) == expected
    serve.delete("apart")


def test_ranks_apart_on_request(cluster, expected):
    from ray import serve

    client, describe = deployed("spread", tensor_parallel_size=2, rank_placement="spread")
    info = describe(lambda info: info["degraded"] == [])
    assert info["config"]["tensor_parallel_size"] == 2
    assert answers(client) == expected
    serve.delete("spread")
