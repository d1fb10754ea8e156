"""One unit: the replica that starts its workers, hands requests to the step loop and deltas back to their callers.

When a target rank is lost, every request in flight is told `UnitLost` (its `Client` goes on elsewhere, or here again) and the
next generation of ranks is started; requests that come meanwhile wait for it a little. When the drafter is lost, nothing ends.
It must not know HTTP or text.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.admission import check_spec
from dflash2_ray.core.drafter_watch import DrafterWatch
from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.core.places import Place, Places
from dflash2_ray.core.scaling import UnitLoad
from dflash2_ray.core.wire import ends, merge_items, pack_error, unpack_spec
from dflash2_ray.engine.delta_line import TAKE_TIMEOUT_S, Line, LineServer, Mailbox
from dflash2_ray.engine.drafter_keeper import DrafterKeeper
from dflash2_ray.engine.farewell import application_goes_on
from dflash2_ray.engine.overview import unit_row
from dflash2_ray.engine.placement import UnitPlacement
from dflash2_ray.engine.rank_group import RankGroup
from dflash2_ray.engine.ray_mirror import RayMirror
from dflash2_ray.engine.unit_accounts import UnitAccounts
from dflash2_ray.engine.unit_reporter import Count, UnitReporter
from dflash2_ray.engine.unit_scaling import reported
from dflash2_ray.errors import DFlash2Error, Stopping, UnitLost

logger = logging.getLogger("ray.serve")
failure_log = FailureLog(logger)
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
_HOLD_S = 5.0  # how long a request waits here for the next generation before its client is told to look elsewhere
_MOST_FRUITLESS = 3  # generations in a row that brought no token: then the whole unit is replaced
_WATCH_PERIOD_S = 0.5
_OVERVIEW_S = 2.0  # for rank 0's part of an overview


class Unit:
    """A Serve deployment's class. Build with an awaited `__init__`; one instance per replica."""

    async def __init__(self, config: ServiceConfig, placement: UnitPlacement, bookkeeper: Any) -> None:  # type: ignore[misc]
        self.config = self._deployed = config
        self._placement = placement
        self._streams: dict[str, Mailbox] = {}
        self._places = Places(
            config.max_num_seqs + config.max_queued_requests,
            config.max_queued_tokens,
            on_change=lambda: self._lines.tell(),
        )
        self._lines = LineServer(
            self._take,
            self._hang_up,
            lambda request_id, num_tokens: self._accounts.book.stopped(request_id, num_tokens),
            self._places.refused_elsewhere,
            self._places.notice,
        )
        self._serving = asyncio.Event()
        self._failed: str | None = None
        self._stopping = False
        self._num_fruitless = 0
        self._num_calls = 0  # of requests and descriptions
        self._num_cancelled = 0  # requests whose client left
        self._num_by_line = 0  # requests whose deltas went by a front's line
        self._num_rebuilds = 0
        self._last_rebuild_s: float | None = None
        self._keeper = DrafterKeeper(config, placement, self._send_address) if placement.separate else None
        self._group = RankGroup(config, placement, 0, self._deliver)
        self._tasks: list[asyncio.Task[None]] = []
        try:
            drafter = asyncio.ensure_future(self._keeper.start()) if self._keeper else None
            await self._group.start(drafter)
            await self._lines.start(ray.util.get_node_ip_address(), serve.get_replica_context().replica_tag)
        except BaseException:
            self._close()
            raise
        self.facts = self._group.facts
        self._target_folder = Path(self._group.target_folder)
        self._accounts = UnitAccounts(config, self.facts)
        self._reporter = UnitReporter(
            bookkeeper, self._count, _own_index, RayMirror(serve.get_replica_context().app_name).tell
        )
        self._serving.set()
        await self._reporter.start()
        self._tasks = [
            asyncio.create_task(work) for work in (self._supervise(), self._watch_drafter(), self._reporter.run())
        ]

    # ---- requests -----------------------------------------------------------------------------------------------

    async def generate(self, spec: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One request's deltas as plain values; a refusal or loss is one last item {"refused": error}.

        A spec with `by_line` has a first item {"line": address}: whoever takes the request over to its line (`delta_line.py`) gets
        the rest there, and this stream only ends. Closing or cancelling the stream cancels the request, queued or running.
        """
        self._num_calls += 1
        arrived, book = time.monotonic(), self._accounts.book
        request_id, by_line, num_choices = spec["request_id"], spec.pop("by_line", False), spec.pop("num_choices", 1)
        added = finished = False
        place: Place | None = None
        mailbox: Mailbox | None = None
        try:
            place = self._admit(spec)
            mailbox = Mailbox(request_id, ends, place.started)
            await self._wait_for_ranks()
            group = self._group
            if request_id in self._streams:  # its client lost the connection and asks again
                group.send({"abort": request_id})
                self._streams[request_id].hang_up()
                book.close(request_id, None)
            self._streams[request_id] = mailbox
            book.open(spec, num_choices, arrived)
            group.send({"add": spec})
            added = True
            if by_line:
                yield {"line": self._lines.address}
                await mailbox.decided(TAKE_TIMEOUT_S)
            while not finished:
                item = merge_items(
                    [await mailbox.get(), *mailbox.waiting()]
                )  # the caller may be slower than the engine
                finished = ends(item)
                if mailbox.line is None:
                    yield item
        except DFlash2Error as error:
            yield {"refused": pack_error(error)}
        finally:
            if place is not None:
                place.leave()
            if mailbox is not None and self._streams.get(request_id) is mailbox:
                del self._streams[request_id]
                if added and not finished and not group.lost.done():
                    self._num_cancelled += 1
                    book.close(request_id, "abort")
                    with contextlib.suppress(UnitLost):
                        group.send({"abort": request_id})
                book.close(request_id, None)

    def _admit(self, spec: dict[str, Any]) -> Place:
        if self._stopping:
            raise Stopping("the unit is draining")
        unpacked = unpack_spec(spec)
        check_spec(unpacked, vocab_size=self.facts["vocab_size"], max_model_len=self.facts["max_model_len"])
        return self._places.enter(len(unpacked.prompt_token_ids) + len(unpacked.output_token_ids))

    async def _wait_for_ranks(self) -> None:
        if not self._serving.is_set():
            try:
                await asyncio.wait_for(self._serving.wait(), _HOLD_S)
            except TimeoutError:
                raise UnitLost(self._failed or "the unit's ranks are being replaced") from None

    def _deliver(self, item: dict[str, Any]) -> None:
        """Items without a stream belong to cancelled requests."""
        mailbox = self._streams.get(item["request_id"])
        if mailbox is not None:
            self._accounts.book.take(item)
            mailbox.put(item)

    def _take(self, request_id: str, line: Line) -> bool:
        mailbox = self._streams.get(request_id)
        taken = mailbox is not None and mailbox.go_by(line)
        self._num_by_line += taken
        return taken

    def _hang_up(self, line: Line) -> None:
        for mailbox in self._streams.values():
            if mailbox.line is line:
                mailbox.hang_up()

    # ---- life ---------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Replace the target ranks whenever a generation is lost."""
        while True:
            reason = await self._group.lost
            since = time.monotonic()
            self._serving.clear()
            failure_log.error(
                "target ranks lost: %s; %d requests go on when they are back", reason, len(self._streams), kind=reason
            )
            self._accounts.note(self._group)
            for request_id, mailbox in self._streams.items():
                self._accounts.book.close(request_id, None)
                mailbox.put({"refused": pack_error(UnitLost(reason))})
            self._streams = {}
            self._group.kill()
            if not await self._rebuild(reason):
                return
            self._last_rebuild_s = time.monotonic() - since
            self._serving.set()
            self._tune()  # these ranks were built before the newest change, perhaps
            logger.info(
                "target ranks are back after %.1f s (generation %d)", self._last_rebuild_s, self._group.generation
            )

    async def _rebuild(self, reason: str) -> bool:
        """Start generations until one serves; False when the unit gives up and Serve has to replace it."""
        while True:
            self._num_fruitless = 0 if self._group.num_items else self._num_fruitless + 1
            if self._num_fruitless >= _MOST_FRUITLESS:
                self._failed = f"{self._num_fruitless} generations of ranks in a row were lost before their first token, the last: {reason}"
                logger.error("%s; the unit gives up and is replaced", self._failed)
                return False
            self._num_rebuilds += 1
            self._group = RankGroup(self.config, self._placement, self._group.generation + 1, self._deliver)
            try:
                await self._group.start(self._present_drafter())
                return True
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                reason = f"generation {self._group.generation} did not start: {cause}"
                failure_log.error("%s", reason, kind=cause)
                self._group.kill()

    def _present_drafter(self) -> Any:
        """The drafter's address as something to await; None while there is none: the ranks then start without it."""
        if self._keeper is None or self._keeper.address is None:
            return None
        present: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        present.set_result(self._keeper.address)
        return present

    def _send_address(self, address: dict[str, Any]) -> None:
        self._tell({"drafter": address})

    def _tune(self) -> None:
        self._tell({"tune": {"draft_deadline_ms": self.config.draft_deadline_ms}})

    def _tell(self, message: dict[str, Any]) -> None:
        """Say something to the step loop. What ranks that are lost just now have to know is told when the next generation serves."""
        with contextlib.suppress(UnitLost):
            if self._serving.is_set():
                self._group.send(message)

    async def _watch_drafter(self) -> None:
        """Hand a hung drafter to its keeper, and its address again to ranks that have lost it or never had it."""
        watch, clock = DrafterWatch(), asyncio.get_running_loop()
        while self._keeper is not None:
            await asyncio.sleep(_WATCH_PERIOD_S)
            address = self._keeper.address
            state = self._group.pulse.get("drafter") if self._serving.is_set() else None
            verdict = watch.look(clock.time(), self._group.generation, None if address is None else str(address), state)
            if verdict == "tell" and address is not None:
                self._send_address(address)
            elif verdict == "hung":
                self._keeper.replace("it has answered nothing for too long")
            elif verdict == "apart":
                self._keeper.replace("the ranks cannot connect to it")

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's change in place: the deployed settings with `user_config` over them. Raises ConfigError; then nothing changes."""
        config = self.config = self._deployed.tuned(user_config or {})
        self._places.limit(config.max_num_seqs + config.max_queued_requests, config.max_queued_tokens)
        self._tune()
        logger.info("settings changed in place: %s", user_config or "back to those of the deployment")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve asks every unit for where their number follows the load."""
        usage = float(self._group.pulse.get("kv_usage") or 0.0)
        return reported(
            UnitLoad(self._places.queue_wait_s, usage, self._places.num_requests / self.config.max_num_seqs)
        )

    async def check_health(self) -> None:
        """Serve's health check: a unit that gave up is replaced; one that rebuilds itself is left alone."""
        if self._failed is not None:
            raise UnitLost(self._failed)

    async def describe(self) -> dict[str, Any]:
        """What runs, and how full it is. Raises UnitLost while a rank is missing."""
        self._num_calls += 1
        if not self._serving.is_set():
            raise UnitLost(self._failed or "the unit's ranks are being replaced")
        return {
            **await self._group.describe(),
            "num_requests_in_flight": self._places.num_requests,
            "num_queued_tokens": self._places.num_queued_tokens,
            "num_requests_cancelled": self._num_cancelled,
            "num_requests_by_line": self._num_by_line,
            **self._life(),
        }

    async def overview(self) -> dict[str, Any]:
        """What `engine.overview` shows of this unit, also while ranks are missing, and in time even if rank 0 does not answer."""
        replica = serve.get_replica_context()
        facts, why = None, self._failed
        try:
            facts = await asyncio.wait_for(self.describe(), _OVERVIEW_S)
        except UnitLost as error:
            why = str(error)
        except TimeoutError:
            why = f"target rank 0 has not answered for {_OVERVIEW_S:g} s"
        life = self._life()
        del life["startup_probe"]
        return {"unit": replica.rank.rank, "replica": replica.replica_tag, **unit_row(facts, why), **life}

    def _life(self) -> dict[str, Any]:
        """What was lost and replaced, and who works for this unit now."""
        group, keeper = self._group, self._keeper
        drafter = (group.pulse.get("drafter") or {}).get("connected", True) if keeper else None
        return {
            "generation": group.generation,
            "startup_probe": group.probe,
            "num_rebuilds": self._num_rebuilds,
            "last_rebuild_s": self._last_rebuild_s,
            "num_drafter_restarts": keeper.num_restarts if keeper else 0,
            "last_drafter_restart_s": keeper.last_restart_s if keeper else None,
            "degraded": [] if keeper is None or (keeper.address is not None and drafter) else ["drafter"],
            "workers": self._workers(),
        }

    def _workers(self) -> list[dict[str, Any]]:
        """role, node, process id and GPUs of every process of this unit, and how often Ray called it."""
        node = {"node_id": ray.get_runtime_context().get_node_id(), "host": ray.util.get_node_ip_address()}
        rows = [{"role": "unit", **node, "pid": os.getpid(), "gpu_ids": [], "num_calls": self._num_calls}]
        rows += [rank.describe(f"target rank {index}") for index, rank in enumerate(self._group.ranks)]
        if self._keeper is not None and self._keeper.worker is not None:
            rows.append(self._keeper.worker.describe("drafter"))
        return rows

    async def text_files(self) -> dict[str, bytes]:
        """The target's tokenizer and template files, for fronts on nodes that do not hold the checkpoint."""
        files = {
            name: (self._target_folder / name).read_bytes()
            for name in TEXT_FILES
            if (self._target_folder / name).is_file()
        }
        if self.config.chat_template is not None:
            files["chat_template.override"] = Path(self.config.chat_template).read_bytes()
        return files

    async def _count(self) -> Count:
        return await self._accounts.count(
            self._group, self._keeper, self._places, serving=self._serving.is_set(), num_rebuilds=self._num_rebuilds
        )

    async def _leave(self) -> None:
        """Take the ranks' last numbers, give their machines back, and only then see that somebody has the numbers."""
        self._stopping = True
        await self._count()
        self._serving.clear()
        self._close()
        await self._reporter.leave(application_goes_on)

    def _close(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        self._group.kill()
        self._lines.close()
        if self._keeper is not None:
            self._keeper.close()

    def __del__(self) -> Any:
        """Serve calls it when the replica has drained, and awaits what it returns."""
        return self._leave() if getattr(self, "_tasks", None) and not self._stopping else None


def _own_index() -> str:
    """Serve's number of this unit among the units; one that replaces another has the other's."""
    return str(serve.get_replica_context().rank.rank)
