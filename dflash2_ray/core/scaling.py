"""How many units a load wants: by how long requests wait and how full the KV pages are, not by how many requests run.

A unit that runs many short requests well needs no help; one whose newcomers wait does. Pure arithmetic; delays between a wish and
its fulfilment are Serve's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2_ray.config import Autoscaling

_DOWN_SHARE = 0.7  # a unit goes only if the others then stand at most so near to what would bring it back


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """queue_wait_s: age of the oldest request without a first token. kv_usage, places_usage: share of pages and of max_num_seqs in
    use, 0 to 1 (places: more while requests wait)."""

    queue_wait_s: float
    kv_usage: float
    places_usage: float


def wanted_units(loads: Sequence[UnitLoad], limits: Autoscaling) -> int:
    """For the units that run now, one load each. At most twice as many, at least one less; never none."""
    num_units = len(loads)
    if num_units == 0:
        return 1
    wait_s = sum(load.queue_wait_s for load in loads) / num_units
    kv_usage = sum(load.kv_usage for load in loads) / num_units
    pressure = max(wait_s / limits.target_queue_wait_s, kv_usage / limits.max_kv_usage)
    if pressure > 1:
        return math.ceil(num_units * min(pressure, 2.0))
    if num_units > 1:
        fewer = num_units / (num_units - 1)
        places = sum(load.places_usage for load in loads) / num_units
        if wait_s == 0 and places * fewer <= _DOWN_SHARE and kv_usage * fewer <= _DOWN_SHARE * limits.max_kv_usage:
            return num_units - 1
    return num_units
