"""One unit: the replica that starts its target rank, hands requests to the step loop and deltas back to their callers.

A unit is the thing that lives and dies together. When its rank is lost, every request in flight ends with `UnitLost` and the
health check fails, so that Serve replaces the whole unit. It must not know HTTP or text.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.admission import check_spec
from dflash2_ray.core.wire import pack_error, unpack_spec
from dflash2_ray.engine.target_rank import TargetRank
from dflash2_ray.errors import ConfigError, DFlash2Error, Overloaded, Stopping, UnitLost
from dflash2_ray.runtime.channel import AsyncChannel, ChannelClosed

logger = logging.getLogger("ray.serve")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
_PROGRESS_PERIOD_S = 0.5


class Unit:
    """A Serve deployment's class. Build with an awaited `__init__`; one instance per replica."""

    async def __init__(self, config: ServiceConfig, rank_resources: dict[str, float]) -> None:  # type: ignore[misc]
        self.config = config
        self._streams: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._lost: str | None = None
        self._stopping = False
        actor: Any = ray.remote(TargetRank)
        self._rank: Any = actor.options(
            max_restarts=0,
            max_concurrency=4,
            num_cpus=rank_resources.get("CPU", 0),
            num_gpus=rank_resources.get("GPU", 0),
            scheduling_strategy=_own_bundle(1),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAY_worker_niceness": "0"}},
        ).remote()
        try:
            self._start = await self._load()
        except Exception:
            ray.kill(self._rank)
            raise
        self.facts: dict[str, Any] = self._start["facts"]
        self._limit = self.facts["config"]["max_num_seqs"] + self.facts["config"]["max_queued_requests"]
        self._alive = self._rank.run.remote()
        self._channel = await AsyncChannel.connect(self._start["host"], self._start["port"], self._start["token"])
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._watch())]

    async def _load(self) -> dict[str, Any]:
        """Load with a line of progress whenever a phase or a tenth of it is done."""
        loading = asyncio.ensure_future(self._rank.load.remote(self.config))
        shown: tuple[str, int] = ("", -1)
        while True:
            done, _ = await asyncio.wait({loading}, timeout=_PROGRESS_PERIOD_S)
            if done:
                break
            phase, at, total = await self._rank.progress.remote()
            step = (phase, int(10 * at / max(total, 1)))
            if step != shown:
                logger.info("start-up: %s %d %%", phase, 100 * at / max(total, 1))
                shown = step
        try:
            return dict(loading.result())
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                logger.error("this configuration cannot be served: %s", error.cause)
                raise error.cause from None
            raise

    # ---- requests -----------------------------------------------------------------------------------------------

    async def generate(self, spec: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One request's deltas as plain values; a refusal or loss is one last item {"refused": error}.

        Closing or cancelling the stream cancels the request in the engine, queued or running.
        """
        request_id = spec["request_id"]
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        finished = False
        try:
            self._admit(spec)
            self._streams[request_id] = queue
            self._send({"add": spec})
            while not finished:
                item = await queue.get()
                while not queue.empty():  # the caller was slower than the engine: one item for all
                    item = _merged(item, queue.get_nowait())
                finished = "refused" in item or item.get("finish_reason") is not None
                yield item
        except DFlash2Error as error:
            finished = True
            yield {"refused": pack_error(error)}
        finally:
            if self._streams.get(request_id) is queue:
                del self._streams[request_id]
                if not finished and self._lost is None:
                    self._send({"abort": request_id})

    def _admit(self, spec: dict[str, Any]) -> None:
        if self._lost is not None:
            raise UnitLost(self._lost)
        if self._stopping:
            raise Stopping("the unit is draining")
        unpacked = unpack_spec(spec)
        check_spec(unpacked, vocab_size=self.facts["vocab_size"], max_model_len=self.facts["max_model_len"])
        if len(self._streams) >= self._limit:
            raise Overloaded(
                f"the queue is full: {len(self._streams)} requests run or wait (max_num_seqs + max_queued_requests = "
                f"{self._limit}); retry later"
            )

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            self._lose(f"the connection to the target rank closed: {error}")
            raise UnitLost(self._lost or "lost") from None

    # ---- life ---------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Deltas from the loop to the streams they belong to; ones without a stream belong to cancelled requests."""
        try:
            while True:
                frame = await self._channel.receive()
                for item in frame.get("deltas") or [frame]:
                    queue = self._streams.get(item["request_id"])
                    if queue is not None:
                        queue.put_nowait(item)
        except ChannelClosed as error:
            self._lose(f"the connection to the target rank closed: {error}")

    async def _watch(self) -> None:
        try:
            reason = await self._alive
        except ray.exceptions.RayError as error:
            reason = f"target rank 0 died: {type(error).__name__}"
        if not self._stopping:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        if not self._stopping:
            logger.error("unit lost: %s; %d requests end with an error", reason, len(self._streams))
        for queue in self._streams.values():
            queue.put_nowait({"refused": pack_error(UnitLost(reason))})

    async def check_health(self) -> None:
        """Serve's health check: a unit without its rank is replaced."""
        if self._lost is not None:
            raise UnitLost(self._lost)

    async def describe(self) -> dict[str, Any]:
        """What runs, and how full it is. Raises UnitLost."""
        if self._lost is not None:
            raise UnitLost(self._lost)
        return {**dict(await self._rank.describe.remote()), "num_requests_in_flight": len(self._streams)}

    async def text_files(self) -> dict[str, bytes]:
        """The target's tokenizer and template files, for fronts on nodes that do not hold the checkpoint."""
        folder = Path(self._start["target_folder"])
        files = {name: (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()}
        if self.config.chat_template is not None:
            files["chat_template.override"] = Path(self.config.chat_template).read_bytes()
        return files

    def __del__(self) -> None:
        self._stopping = True
        for task in getattr(self, "_tasks", []):
            task.cancel()
        channel = getattr(self, "_channel", None)
        if channel is not None:
            channel.close()
        ray.kill(self._rank)


def _own_bundle(index: int) -> Any:
    """Bundle `index` of the placement group that this replica lives in."""
    group = get_current_placement_group()
    if group is None:  # a replica without a group (local testing) places its rank anywhere
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    if "refused" in first or "refused" in second:
        return second
    return {**second, "token_ids": [*first["token_ids"], *second["token_ids"]]}
