"""The actor class that holds one target rank. Rank 0 also runs the step loop next to the device, and a colocated drafter.

Ray is called for its life cycle only; requests and deltas travel over a framed socket, tensors over the ranks' own group.
"""

import threading
from typing import Any

from dflash2_ray.engine.worker_actor import WorkerActor


class TargetRank(WorkerActor):
    """`load`, on rank 0 `warm_up`, then `run`; rank 0 of several opens the `rendezvous` first."""

    def __init__(self) -> None:
        super().__init__()
        self._rendezvous: Any = None
        self._blueprint: Any = None
        self._loop: Any = None
        self._server: Any = None
        self._follower: Any = None
        self._lock = threading.Lock()
