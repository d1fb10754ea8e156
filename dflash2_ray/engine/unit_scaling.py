"""Serve's autoscaling of units: what a unit reports, and the policy that Serve's controller asks. It must not know how it is decided."""

from dataclasses import asdict, fields
from typing import Any

from dflash2_ray.config import Autoscaling
from dflash2_ray.core.scaling import UnitLoad, wanted_units

POLICY = "dflash2_ray.engine.unit_scaling:UnitScaling"
_NAMES = tuple(field.name for field in fields(UnitLoad))


def reported(load: UnitLoad) -> dict[str, float]:
    """A unit's load as Serve collects it."""
    return asdict(load)


class UnitScaling:
    """Built by Serve's controller from `limits`, the settings' `autoscaling` as plain values; called in every round of it."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = Autoscaling.model_validate(limits)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of units wanted, and no state. Without a report of every unit nothing changes."""
        metrics = context.aggregated_metrics or {}
        told = [metrics.get(name) or {} for name in _NAMES]
        if not context.running_replicas or any(len(one) != len(context.running_replicas) for one in told):
            return context.target_num_replicas, {}
        loads = [UnitLoad(*(one[unit] for one in told)) for unit in told[0]]
        return wanted_units(loads, self._limits), {}
