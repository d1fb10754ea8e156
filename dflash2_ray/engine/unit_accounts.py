"""Everything that one unit counts: its requests, and its ranks over all their generations."""

from collections.abc import Mapping
from typing import Any

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.ledger import Generations, Ledger, Numbers, add_up
from dflash2_ray.core.measures import REJECTION_REASONS
from dflash2_ray.core.places import Places
from dflash2_ray.core.request_book import RequestBook
from dflash2_ray.engine.drafter_keeper import DrafterKeeper
from dflash2_ray.engine.rank_group import RankGroup
from dflash2_ray.engine.unit_reporter import Count

_PULSE_S = 0.2
_WINDOW_DRAFTS = 40  # of one reading of the `sglang:*` gauges


class UnitAccounts:
    """`book`: of the requests."""

    def __init__(self, config: ServiceConfig, facts: Mapping[str, Any]) -> None:
        self._config = config
        engine = facts["config"]
        width = int(engine["num_speculative_tokens"])
        self._facts = {
            "model": facts["model"], "num_speculative_tokens": width, "most_tokens_per_step": width + 1,
            "max_model_len": facts["max_model_len"], "sglang": config.sglang_metrics,
        }  # fmt: skip
        self._cache = {
            "block_size": engine["page_size"], "num_gpu_blocks": facts["num_pages"], "cache_dtype": "auto",
            "gpu_memory_utilization": config.gpu_memory_utilization, "enable_prefix_caching": engine["enable_prefix_caching"],
        }  # fmt: skip
        self._ledger = Ledger()
        self.book = RequestBook(self._ledger)
        self._generations = Generations()
        self._window: tuple[float, float, float] = (0, 0, 0)  # drafts, draft tokens and accepted ones where it began
        self._lately: dict[str, float] = {}

    def note(self, group: RankGroup) -> None:
        """The last word of ranks that are lost."""
        self._generations.note(group.generation, group.pulse.get("numbers") or {})

    async def count(
        self, group: RankGroup, keeper: DrafterKeeper | None, places: Places, *, serving: bool, num_rebuilds: int
    ) -> Count:
        """For the unit's reporter."""
        pulse = await group.fresh_pulse(_PULSE_S) if serving else group.pulse
        self.note(group)
        numbers = self._generations.total()
        add_up(numbers, self._ledger.numbers)
        numbers["restarts/target"] = num_rebuilds
        numbers["restarts/drafter"] = keeper.num_restarts if keeper else 0
        for reason in REJECTION_REASONS:
            numbers[f"admission_rejections/{reason}"] = places.num_rejected[reason]
        running = pulse.get("running", 0) if serving else 0
        waiting = pulse.get("waiting", 0) if serving else places.num_requests
        gauges = {
            "running": running, "waiting": waiting, "waiting_by_reason/capacity": waiting,
            "kv_usage": pulse.get("kv_usage", 0.0) if serving else 0.0, "cache": self._cache,
            **{f"rank_up/target/{index}": int(serving) for index in range(self._config.tensor_parallel_size)},
        }  # fmt: skip
        if keeper is not None:
            gauges["rank_up/drafter/0"] = int(keeper.address is not None)
        if self._config.wants_drafter:
            apart = keeper is not None and not (
                keeper.address is not None and (pulse.get("drafter") or {}).get("connected")
            )
            gauges["spec_active"] = int(serving and not apart)
        return numbers, gauges | self._sglang(numbers), self._facts

    def _sglang(self, numbers: Numbers) -> dict[str, float]:
        """Acceptance over the last window of verify steps, as SGLang tells it."""
        if not self._config.sglang_metrics:
            return {}
        now = tuple(numbers.get(key, 0) for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
        drafts, tokens, accepted = (after - before for after, before in zip(now, self._window, strict=True))
        if drafts >= _WINDOW_DRAFTS:
            self._window = now  # type: ignore[assignment]
            self._lately = {"window_accept_length": 1 + accepted / drafts, "window_accept_rate": accepted / tokens}
        width = self._facts["num_speculative_tokens"]
        return {"num_steps": width, "num_draft_slots": width + 1, **self._lately}
