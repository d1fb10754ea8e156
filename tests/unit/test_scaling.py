"""How many units a load wants."""

from types import SimpleNamespace

import pytest

from dflash2_ray.config import Autoscaling, ServiceConfig
from dflash2_ray.core.scaling import UnitLoad, wanted_units
from dflash2_ray.engine.unit_scaling import UnitScaling, reported
from dflash2_ray.errors import ConfigError

LIMITS = Autoscaling(max_replicas=8)  # one second, 90 % of the pages
IDLE, BUSY = UnitLoad(0.0, 0.0, 0.0), UnitLoad(0.0, 0.5, 0.9)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 1),
        ([IDLE], 1),
        ([BUSY], 1),
        ([UnitLoad(1.0, 0.2, 1.0)], 1),  # just what is aimed at
        ([UnitLoad(1.01, 0.2, 1.0)], 2),
        ([UnitLoad(90.0, 0.2, 5.0)], 2),  # twice at most
        ([UnitLoad(0.0, 0.91, 0.4)], 2),
        ([UnitLoad(3.0, 0.1, 1.0), IDLE], 3),  # 1.5 times what is aimed at
        ([UnitLoad(1.0, 0.1, 1.0), IDLE], 2),  # somebody waits: nobody goes
        ([IDLE, IDLE], 1),
        ([IDLE] * 4, 3),  # one at a time
        ([UnitLoad(0.0, 0.1, 0.35)] * 2, 1),
        ([UnitLoad(0.0, 0.1, 0.36)] * 2, 2),  # the one that stays would be too full
        ([UnitLoad(0.0, 0.4, 0.1)] * 2, 2),
        ([BUSY, BUSY, IDLE], 2 + 1),
    ],
)
def test_wanted(loads, wanted):
    assert wanted_units(loads, LIMITS) == wanted


def test_what_serve_asks():
    """Through the shapes of Serve's context: metric name → replica → value."""
    policy = UnitScaling(LIMITS.model_dump())

    def context(loads, running=None):
        metrics = {}
        for unit, load in enumerate(loads):
            for name, value in reported(load).items():
                metrics.setdefault(name, {})[unit] = value
        return SimpleNamespace(
            aggregated_metrics=metrics, running_replicas=running or list(range(len(loads))), target_num_replicas=5
        )

    assert policy(context([UnitLoad(4.0, 0.0, 1.0), UnitLoad(4.0, 0.0, 1.0)])) == (4, {})
    assert policy(context([IDLE, IDLE, BUSY])) == (2, {})
    assert policy(context([IDLE], running=[0, 1])) == (5, {})  # one has not reported yet
    assert policy(SimpleNamespace(aggregated_metrics=None, running_replicas=[0], target_num_replicas=5)) == (5, {})


def test_the_key():
    config = ServiceConfig.from_keys({"autoscaling": "2-4", "num_replicas": "2"})
    assert (config.autoscaling.min_replicas, config.max_num_replicas) == (2, 4)
    assert ServiceConfig().max_num_replicas == 1
    assert (
        ServiceConfig.from_keys({"autoscaling": {"max_replicas": 3, "max_kv_usage": 0.5}}).autoscaling.max_kv_usage
        == 0.5
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("many", "expected MIN-MAX"),
        ("4-2", "min_replicas=4 is more than max_replicas=2"),
        ("2-4", "num_replicas=1 is outside autoscaling=2-4"),
        ({"max_replica": 3}, "max_replica"),
        ({"max_replicas": 3, "max_kv_usage": 2}, "max_kv_usage"),
    ],
)
def test_a_wrong_key(value, says):
    with pytest.raises(ConfigError, match=says):
        ServiceConfig.from_keys({"autoscaling": value})
