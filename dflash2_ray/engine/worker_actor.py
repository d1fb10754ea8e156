"""What every worker actor of a unit can do besides its own work: say where it is and how far its start-up is.

Ray is called for life cycle only: `load` once, `run` for life (its result, or its failure, is the sign that the worker ended).
"""

import os
from typing import Any

import ray

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAY_worker_niceness": "0",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512", "LRU_CACHE_CAPACITY": "512",  # torch's and oneDNN's own, of compiled products: 1,024 fill 600 MiB
}  # fmt: skip


class WorkerActor:
    """Base of `TargetRank` and `Drafter`."""

    def __init__(self) -> None:
        self._progress: tuple[str, float, float] = ("start", 0.0, 1.0)

    def whereabouts(self) -> dict[str, Any]:
        """node_id, host (the node's IP address), pid, gpu_ids."""
        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "gpu_ids": list(context.get_accelerator_ids().get("GPU", [])),
        }

    def progress(self) -> tuple[str, float, float]:
        """(phase, done, total) of the start-up."""
        return self._progress

    def _note(self, phase: str, done: float, total: float) -> None:
        self._progress = (phase, done, total)
