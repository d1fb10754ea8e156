"""Serve's autoscaling of units: what a unit reports, and the policy that Serve's controller asks. It must not know how it is decided."""

from typing import Any

from dflash2_ray.config import Autoscaling
from dflash2_ray.core.scaling import UnitLoad, wanted_units

POLICY = "dflash2_ray.engine.unit_scaling:UnitScaling"


def reported(load: UnitLoad) -> dict[str, float]:
    """A unit's load as Serve collects it."""
    return {"queue_wait_s": load.queue_wait_s, "kv_usage": load.kv_usage, "places_usage": load.places_usage}


class UnitScaling:
    """Built by Serve's controller from `limits`, the settings' `autoscaling` as plain values; called in every round of it."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = Autoscaling.model_validate(limits)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of units wanted, and no state. Without a report of every unit nothing changes."""
        metrics = context.aggregated_metrics or {}
        names = [name for name in ("queue_wait_s", "kv_usage", "places_usage") if len(metrics.get(name) or {}) == len(context.running_replicas)]
        if len(names) < 3 or not context.running_replicas:
            return context.target_num_replicas, {}
        loads = [UnitLoad(*(metrics[name][unit] for name in names)) for unit in metrics["kv_usage"]]
        return wanted_units(loads, self._limits), {}
