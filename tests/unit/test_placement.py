"""Bundles of a unit, and the GPU map of a cluster (cases B32, B35)."""

import pytest

from dflash2_ray.config import ServiceConfig
from dflash2_ray.engine.placement import NodeFacts, map_gpus, parse_cluster, place_unit
from dflash2_ray.errors import ConfigError


def config(**keys):
    return ServiceConfig.from_keys(keys)


@pytest.mark.parametrize(
    ("keys", "num_gpus", "bundles", "rank_bundles", "drafter_bundle"),
    [
        ({}, 0, [{"CPU": 0.1}, {"CPU": 0.5}], (1,), None),
        ({"tensor_parallel_size": 2}, 0, [{"CPU": 0.1}, {"CPU": 1.0}], (1, 1), None),
        ({"drafter_placement": "separate"}, 0, [{"CPU": 0.1}, {"CPU": 0.5}, {"CPU": 0.5}], (1,), 2),
        ({}, 1, [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}], (1,), None),
        ({}, 2, [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}], (1,), 2),
        ({"num_replicas": 2}, 3, [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}], (1,), None),
        ({"drafter_placement": "colocated"}, 8, [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}], (1,), None),
        ({"drafter": "none", "drafter_placement": "separate"}, 8, [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}], (1,), None),
        ({"device": "cpu"}, 8, [{"CPU": 0.1}, {"CPU": 0.5}], (1,), None),
        (
            {"tensor_parallel_size": 2, "rank_placement": "spread"},
            3,
            [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}],
            (1, 2),
            3,
        ),
    ],
    ids=str,
)
def test_bundles(keys, num_gpus, bundles, rank_bundles, drafter_bundle):
    placement = place_unit(config(**keys), num_gpus)
    assert list(placement.bundles) == bundles
    assert (placement.rank_bundles, placement.drafter_bundle) == (rank_bundles, drafter_bundle)
    assert placement.separate == (drafter_bundle is not None)
    assert len(placement.labels) == len(bundles)


def test_labels_go_to_their_bundles():
    keys = {"drafter_placement": "separate", "target_labels": "role=target,zone=a", "drafter_labels": {"role": "draft"}}
    assert place_unit(config(**keys), 0).labels == ({}, {"role": "target", "zone": "a"}, {"role": "draft"})
    with pytest.raises(ConfigError, match="target_labels: labels: expected key=value, got 'role'"):
        config(target_labels="role")


def seats(keys, cluster):
    return [(seat.node, seat.gpu, seat.unit, seat.role) for seat in map_gpus(config(**keys), parse_cluster(cluster))]


def test_the_map_keeps_ranks_together_and_the_drafter_near():
    assert seats({"tensor_parallel_size": 2}, "a=4,b=1") == [
        ("a", 0, 0, "rank 0"),
        ("a", 1, 0, "rank 1"),
        ("a", 2, 0, "drafter"),
    ]
    assert seats({"tensor_parallel_size": 2}, "b=1,a=2") == [
        ("a", 0, 0, "rank 0"),
        ("a", 1, 0, "rank 1"),
        ("b", 0, 0, "drafter"),
    ]
    spread = seats({"tensor_parallel_size": 2, "rank_placement": "spread", "drafter_placement": "colocated"}, "1,1")
    assert spread == [("node0", 0, 0, "rank 0"), ("node1", 0, 0, "rank 1")]
    labelled = seats({"drafter_labels": "role=draft"}, "a=2,b=1:role=draft")
    assert labelled == [("a", 0, 0, "rank 0"), ("b", 0, 0, "drafter")]
    assert seats({"num_replicas": 2, "drafter_placement": "colocated"}, "1,1") == [
        ("node0", 0, 0, "rank 0"),
        ("node1", 0, 1, "rank 0"),
    ]
    assert seats({"device": "cpu"}, "4") == []


def test_no_gpu_is_taken_twice():
    taken = [seat[:2] for seat in seats({"num_replicas": 3, "tensor_parallel_size": 2}, "4,3,2")]
    assert len(taken) == len(set(taken)) == 9


@pytest.mark.parametrize(
    ("keys", "cluster", "says"),
    [
        (
            {"tensor_parallel_size": 2},
            "1,1",
            r"needs 2 free GPUs on one node for rank 0, rank 1; tried: node0 \[0: free\]",
        ),
        (
            {"tensor_parallel_size": 2, "drafter_placement": "separate"},
            "2",
            r"drafter; tried: node0 \[0: unit 0 rank 0, 1: unit 0",
        ),
        ({"drafter_labels": "role=draft"}, "4", "with labels role=draft for drafter"),
        ({"device": "cuda"}, "0", r"node0 \[no GPU\]"),
    ],
)
def test_too_few_gpus_is_one_line_with_the_map(keys, cluster, says):
    with pytest.raises(ConfigError, match=says) as caught:
        seats(keys, cluster)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "a", "a=b", "a=-1", "=2", "4,,1", "a=1:zone"])
def test_cluster_descriptions_that_are_none(text):
    with pytest.raises(ConfigError, match="expected"):
        parse_cluster(text)


def test_cluster_description():
    assert parse_cluster("a=4, 2:zone=eu") == [NodeFacts("a", 4, {}), NodeFacts("node1", 2, {"zone": "eu"})]
