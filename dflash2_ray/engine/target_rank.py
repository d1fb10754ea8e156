"""The actor class that holds target rank 0: it loads both models and runs the step loop next to the device.

Ray is called for its life cycle only; requests and deltas travel over a framed socket. In this version a unit has one rank,
and the drafter runs inside it (`colocated`).
"""

import os
import secrets
import threading
from typing import Any

import ray

from dflash2_ray.config import ServiceConfig


class TargetRank:
    """Methods: `load` once, then `run` for life (its result is the sign that the rank ended); the others at any time."""

    def __init__(self) -> None:
        self._progress: tuple[str, float, float] = ("start", 0.0, 1.0)
        self._server: Any = None
        self._lock = threading.Lock()

    def load(self, config: ServiceConfig) -> dict[str, Any]:
        """Load what the configuration names; returns what runs, and where to connect. Raises ConfigError."""
        from dflash2_ray.runtime.build import build_from_blueprint, draw_blueprint
        from dflash2_ray.runtime.loop_server import LoopServer
        from dflash2_ray.runtime.warm_up import warm_up

        def progress(phase: str, done: float, total: float) -> None:
            self._progress = (phase, done, total)

        blueprint = draw_blueprint(config, progress)
        loop = build_from_blueprint(blueprint, config, progress)
        warm_up(loop, progress)
        host = ray.util.get_node_ip_address()
        token = secrets.token_hex(16)
        with self._lock:
            self._server = LoopServer(loop, host, token)
        return {
            "host": host,
            "port": self._server.listener.port,
            "token": token,
            "target_folder": str(blueprint.target_folder),
            "facts": loop.describe(),
        }

    def run(self) -> str:
        """Serve until the unit goes away; returns why it ended."""
        return str(self._server.run())

    def progress(self) -> tuple[str, float, float]:
        """(phase, done, total) of the start-up."""
        return self._progress

    def describe(self) -> dict[str, Any]:
        """What runs, and how full it is."""
        return {**self._server.loop.describe(), "rank_pids": [os.getpid()]}

    def stop(self) -> None:
        """End `run`."""
        with self._lock:
            if self._server is not None:
                self._server.stop()
