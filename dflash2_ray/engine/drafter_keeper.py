"""Keeps a unit's separate drafter alive: starts it, replaces it when it died or hangs, and tells where it is.

Losing the drafter costs speed, never an answer, so there is no limit to how often it is replaced; only the pauses grow.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.engine.drafter import Drafter
from dflash2_ray.engine.placement import UnitPlacement
from dflash2_ray.engine.worker import Worker

logger = logging.getLogger("ray.serve")
failure_log = FailureLog(logger)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_STABLE_S = 60.0  # a drafter that lived so long starts the pauses anew


class DrafterKeeper:
    """`address`: where the present drafter listens, None while there is none. `on_address` is called with every new one."""

    def __init__(
        self, config: ServiceConfig, placement: UnitPlacement, on_address: Callable[[dict[str, Any]], None]
    ) -> None:
        assert placement.drafter_bundle is not None, "only a separate drafter is kept"
        self.address: dict[str, Any] | None = None
        self.num_restarts = 0
        self.last_restart_s: float | None = None
        self._config = config
        self._placement = placement
        self._bundle = placement.drafter_bundle
        self._on_address = on_address
        self.worker: Worker | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """Start the first drafter; returns its address. Raises ConfigError, or what Ray raises."""
        worker, address = await self._launch()
        self._keeping = asyncio.create_task(self._keep(worker))
        return address

    async def _launch(self) -> tuple[Worker, dict[str, Any]]:
        worker = self.worker = Worker(Drafter, self._placement, self._bundle)
        await worker.locate()
        address = self.address = dict(await worker.finish(worker.call("load", self._config), "drafter"))
        return worker, address

    async def _keep(self, worker: Worker) -> None:
        clock = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        while True:
            since = clock.time()
            try:
                reason = f"ended: {await worker.call('run')}"
            except ray.exceptions.RayError as error:
                reason = f"died: {type(error).__name__}"
            lost_at = clock.time()
            failure_log.error("the drafter %s; requests decode plainly until it is back", reason, kind=reason)
            self.address = None
            worker.kill()
            pause = _FIRST_PAUSE_S if lost_at - since > _STABLE_S else min(2 * pause, _LONGEST_PAUSE_S)
            worker, pause = await self._restart(pause)
            self.last_restart_s = clock.time() - lost_at
            logger.info("the drafter is back after %.1f s", self.last_restart_s)

    async def _restart(self, pause: float) -> tuple[Worker, float]:
        """A new drafter, however many attempts it takes, and the pause that the last one needed."""
        while True:
            await asyncio.sleep(pause)
            self.num_restarts += 1
            try:
                worker, address = await self._launch()
                self._on_address(address)
                return worker, pause
            except Exception as error:  # whatever it was, the next attempt may do
                cause = f"{type(error).__name__}: {error}"
                failure_log.error("the drafter could not be restarted: %s", cause, kind=cause)
                self.address = None
                if self.worker is not None:
                    self.worker.kill()
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def replace(self, reason: str) -> None:
        """Kill a drafter that hangs; it is replaced like one that died."""
        if self.address is not None and self.worker is not None:
            failure_log.error("the drafter is replaced: %s", reason, kind=reason)
            self.address = None
            self.worker.kill()

    def close(self) -> None:
        """End the drafter for good."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self.worker is not None:
            self.worker.kill()
