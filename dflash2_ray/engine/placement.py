"""Which bundles a unit asks for: the replica's own, then one per target rank. Pure values; it must not start anything."""

from dataclasses import dataclass

from dflash2_ray.config import ServiceConfig

REPLICA_CPUS = 0.1
RANK_CPUS_ON_GPU = 1.0
RANK_CPUS_ON_CPU = 0.5  # a Ray CPU is a share, not a core; two of these fit a one-core machine beside the front


@dataclass(frozen=True)
class UnitPlacement:
    """bundles[0] is the replica's, bundles[1 + rank] that of a target rank."""

    bundles: tuple[dict[str, float], ...]
    strategy: str

    @property
    def rank_bundle(self) -> dict[str, float]:
        return self.bundles[1]


def place_unit(config: ServiceConfig, num_gpus_in_cluster: float) -> UnitPlacement:
    """`device=auto` uses a GPU where the cluster has one. Strategy PACK keeps a unit on as few nodes as it fits on."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and num_gpus_in_cluster >= 1)
    rank = {"GPU": 1.0, "CPU": RANK_CPUS_ON_GPU} if on_gpu else {"CPU": RANK_CPUS_ON_CPU}
    return UnitPlacement(({"CPU": REPLICA_CPUS}, rank), "PACK")
