"""A worker as its unit holds it: an actor in a bundle of the unit's placement group. Every Ray call to it goes through here."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash2_ray.engine.placement import UnitPlacement
from dflash2_ray.engine.worker_actor import WORKER_ENVIRONMENT, WorkerActor
from dflash2_ray.errors import ConfigError

logger = logging.getLogger("ray.serve")
_PROGRESS_PERIOD_S = 0.5


class Worker:
    """`place`: node, host, process id and GPUs, once `locate` has found them. `num_calls`: Ray calls so far."""

    def __init__(self, kind: type[WorkerActor], placement: UnitPlacement, bundle: int) -> None:
        actor: Any = ray.remote(kind)
        self.num_calls = 0
        self.place: dict[str, Any] | None = None
        self._actor = actor.options(
            max_restarts=0,
            max_concurrency=4,
            num_cpus=placement.worker.get("CPU", 0),
            num_gpus=placement.worker.get("GPU", 0),
            scheduling_strategy=_own_bundle(bundle),
            runtime_env={"env_vars": WORKER_ENVIRONMENT},
        ).remote()

    def call(self, method: str, *arguments: Any) -> Any:
        """Start a method; something to await. For life cycle and descriptions only: a step makes no Ray call."""
        self.num_calls += 1
        return getattr(self._actor, method).remote(*arguments)

    async def locate(self) -> dict[str, Any]:
        """Wait until the actor lives; returns its `place`."""
        place = self.place = dict(await self.call("whereabouts"))
        return place

    async def finish(self, work: Awaitable[Any], name: str) -> Any:
        """Await `work`, with a line of progress whenever a phase of this worker, or a tenth of it, is done. Raises ConfigError."""
        waiting = asyncio.ensure_future(work)
        shown: tuple[str, int] = ("", -1)
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=_PROGRESS_PERIOD_S)
            if done:
                break
            phase, at, total = await self.call("progress")
            step = (phase, int(10 * at / max(total, 1)))
            if step != shown:
                logger.info("start-up of the %s: %s %d %%", name, phase, 100 * at / max(total, 1))
                shown = step
        try:
            return waiting.result()
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                logger.error("this configuration cannot be served: %s", error.cause)
                raise error.cause from None
            raise

    def kill(self) -> None:
        """End the process. One on this node is also killed by process id: a stopped process answers no request to exit."""
        ray.kill(self._actor)
        if self.place is not None and self.place["node_id"] == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.place["pid"], signal.SIGKILL)
            self.place = None

    def describe(self, role: str) -> dict[str, Any]:
        """A row for the unit's description."""
        return {"role": role, **(self.place or {}), "num_calls": self.num_calls}


def _own_bundle(index: int) -> Any:
    group = get_current_placement_group()
    if group is None:  # a replica without a group (local testing) places its workers anywhere
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
