"""Which bundles a unit asks for, and which GPUs they would take on a given cluster. Pure values; it must not start anything.

A bundle never spans nodes: one bundle for all target ranks keeps them together, one bundle per rank lets them spread. The
drafter has a bundle of its own when it is placed `separate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash2_ray.config import ServiceConfig, read_labels
from dflash2_ray.errors import ConfigError

REPLICA_CPUS = 0.1
WORKER_CPUS_ON_GPU = 1.0
WORKER_CPUS_ON_CPU = 0.5  # a Ray CPU is a share, not a core; two of these fit a one-core machine beside the front


@dataclass(frozen=True)
class NodeFacts:
    """A node of the cluster as placement sees it."""

    name: str
    num_gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitPlacement:
    """bundles[0] is the replica's. `rank_bundles[i]`: bundle of target rank i; `drafter_bundle`: None when colocated.
    `worker`: what one rank, or the drafter, takes of its bundle. `labels[i]`: node labels that bundle i asks for."""

    bundles: tuple[dict[str, float], ...]
    labels: tuple[dict[str, str], ...]
    strategy: str
    worker: dict[str, float]
    rank_bundles: tuple[int, ...]
    drafter_bundle: int | None

    @property
    def separate(self) -> bool:
        return self.drafter_bundle is not None


def place_unit(config: ServiceConfig, num_gpus_in_cluster: float) -> UnitPlacement:
    """`device=auto` uses GPUs where the cluster has one. Strategy PACK keeps a unit on as few nodes as it fits on."""
    on_gpu = uses_gpus(config, num_gpus_in_cluster)
    worker = {"GPU": 1.0, "CPU": WORKER_CPUS_ON_GPU} if on_gpu else {"CPU": WORKER_CPUS_ON_CPU}
    num_ranks = config.tensor_parallel_size
    bundles: list[dict[str, float]] = [{"CPU": REPLICA_CPUS}]
    labels: list[dict[str, str]] = [{}]
    if config.rank_placement == "spread":
        bundles += [dict(worker) for _ in range(num_ranks)]
        rank_bundles = tuple(range(1, num_ranks + 1))
    else:
        bundles.append({name: amount * num_ranks for name, amount in worker.items()})
        rank_bundles = (1,) * num_ranks
    labels += [dict(config.target_labels)] * (len(bundles) - 1)
    drafter_bundle = None
    if wants_separate_drafter(config, num_gpus_in_cluster):
        drafter_bundle = len(bundles)
        bundles.append(dict(worker))
        labels.append(dict(config.drafter_labels))
    return UnitPlacement(tuple(bundles), tuple(labels), "PACK", worker, rank_bundles, drafter_bundle)


def uses_gpus(config: ServiceConfig, num_gpus_in_cluster: float) -> bool:
    """Whether the workers ask for GPUs."""
    return config.device == "cuda" or (config.device == "auto" and num_gpus_in_cluster >= 1)


def wants_separate_drafter(config: ServiceConfig, num_gpus_in_cluster: float) -> bool:
    """`auto` gives the drafter a GPU of its own where every unit can have one more; on CPUs it is colocated."""
    if not config.wants_drafter or config.drafter_placement == "colocated":
        return False
    if config.drafter_placement == "separate":
        return True
    needed = config.num_replicas * (config.tensor_parallel_size + 1)
    return uses_gpus(config, num_gpus_in_cluster) and num_gpus_in_cluster >= needed


# ---- the GPU map --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuSeat:
    """One GPU of the cluster and who sits there: `role` is `rank 0` … or `drafter`."""

    node: str
    gpu: int
    unit: int
    role: str


def parse_cluster(text: str) -> list[NodeFacts]:
    """`a=4,b=1:zone=eu:gpu=l4` or plain `4,1`: GPUs by node, with labels. Raises ConfigError."""
    nodes = []
    for index, part in enumerate(word.strip() for word in text.split(",")):
        head, *pairs = part.split(":")
        name, sign, count = head.rpartition("=")
        name = name if sign else f"node{index}"
        if not count.isdecimal() or not name:
            raise ConfigError(
                f"placement: expected NAME=GPUS or GPUS for every node, separated by commas, got {part!r}"
            )
        nodes.append(NodeFacts(name, int(count), read_labels(pairs)))
    return nodes


def map_gpus(config: ServiceConfig, nodes: Sequence[NodeFacts]) -> list[GpuSeat]:
    """Where every worker of every unit would sit, fullest fitting node first. Empty for a CPU service.

    Raises ConfigError with the map that was tried when the GPUs do not suffice.
    """
    total = sum(node.num_gpus for node in nodes)
    if not uses_gpus(config, total):
        return []
    placement = place_unit(config, total)
    taken = {node.name: 0 for node in nodes}
    seats: list[GpuSeat] = []
    for unit in range(config.num_replicas):
        home: str | None = None
        pickiest_first = sorted(_roles(placement).items(), key=lambda one: (not placement.labels[one[0]], -len(one[1])))
        for bundle, roles in pickiest_first:
            fitting = [
                node
                for node in nodes
                if node.num_gpus - taken[node.name] >= len(roles)
                and placement.labels[bundle].items() <= node.labels.items()
            ]
            if not fitting:
                raise ConfigError(_too_few(unit, roles, placement.labels[bundle], nodes, seats))
            node = min(fitting, key=lambda one: (one.name != home, one.num_gpus - taken[one.name]))
            home = home or node.name
            for role in roles:
                seats.append(GpuSeat(node.name, taken[node.name], unit, role))
                taken[node.name] += 1
    return sorted(seats, key=lambda seat: (seat.unit, seat.role == "drafter", len(seat.role), seat.role))


def _roles(placement: UnitPlacement) -> dict[int, list[str]]:
    roles: dict[int, list[str]] = {}
    for rank, bundle in enumerate(placement.rank_bundles):
        roles.setdefault(bundle, []).append(f"rank {rank}")
    if placement.drafter_bundle is not None:
        roles[placement.drafter_bundle] = ["drafter"]
    return roles


def _too_few(
    unit: int, roles: Sequence[str], labels: Mapping[str, str], nodes: Sequence[NodeFacts], seats: Sequence[GpuSeat]
) -> str:
    """One line: who found no seat, and the map so far."""
    rows = []
    for node in nodes:
        own = [f"{seat.gpu}: unit {seat.unit} {seat.role}" for seat in seats if seat.node == node.name]
        own += [f"{gpu}: free" for gpu in range(len(own), node.num_gpus)]
        rows.append(f"{node.name} [{', '.join(own) or 'no GPU'}]")
    who = ", ".join(roles)
    where = " with labels " + ", ".join(f"{key}={value}" for key, value in labels.items()) if labels else ""
    return (
        f"placement: unit {unit} needs {len(roles)} free GPU{'s' if len(roles) > 1 else ''} on one node{where} for {who}; "
        f"tried: {'; '.join(rows)}"
    )
