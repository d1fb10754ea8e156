"""What a unit counts per request: how it ended, its size, and the times between its tokens as they leave for the client."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash2_ray.core.ledger import Ledger
from dflash2_ray.core.messages import StepCount, cut_steps

_DELIVERED = ("stop", "length")


@dataclass(slots=True)
class _Entry:
    """One request in this unit. num_earlier: tokens that it came with, from a unit that was lost."""

    arrived: float
    num_prompt_tokens: int
    num_earlier: int
    max_tokens: int | None
    num_choices: int
    num_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    steps: list[StepCount] = field(default_factory=list)


class RequestBook:
    """`clock`: seconds. Every request that is opened ends with an item that has a finish reason, with `stopped` or with `close`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def open(self, spec: Mapping[str, Any], num_choices: int, arrived: float) -> None:
        """A packed request was let in. arrived: when it came, on the book's clock. num_choices: the option n with the first of the choices, 0 with the others."""
        prompt, output = spec["prompt_token_ids"], spec["output_token_ids"]
        self._entries[spec["request_id"]] = _Entry(
            arrived, len(prompt), len(output), spec["params"].get("max_tokens"), num_choices
        )

    def take(self, item: Mapping[str, Any]) -> None:
        """A packed delta of the request that it names; unknown ones are ignored."""
        entry = self._entries.get(item["request_id"])
        if entry is None or "refused" in item:
            return
        count = len(item["token_ids"])
        if count:
            now = self._clock()
            if entry.last_token is not None:
                self._ledger.observe("inter_token_s", now - entry.last_token)
                self._ledger.observe("output_token_s", (now - entry.last_token) / count, count)
            elif not entry.num_earlier:
                self._ledger.observe("first_token_s", now - entry.arrived)
            entry.last_token = now
            if entry.first_token is None:
                entry.first_token = now
            entry.num_tokens += count
        for num_drafts, num_committed, reason in item["steps"]:
            entry.steps.append((num_drafts, num_committed, reason))
        if item.get("finish_reason") is not None:
            self.close(item["request_id"], item["finish_reason"])

    def stopped(self, request_id: str, num_tokens: int) -> None:
        """A stop string ended the text: its client got `num_tokens` in all and wants no more."""
        entry = self._entries.get(request_id)
        if entry is not None:
            excess = max(0, entry.num_earlier + entry.num_tokens - num_tokens)
            entry.steps = list(cut_steps(entry.steps, excess))
            entry.num_tokens -= excess
            self.close(request_id, "stop")

    def close(self, request_id: str, reason: str | None) -> None:
        """A request is over: `stop`, `length`, `error`, `abort` (its client left), or None where it goes on elsewhere; unknown ones are
        ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        ledger = self._ledger
        spec_steps = [num_committed for num_drafts, num_committed, _ in entry.steps if num_drafts]
        ledger.add("emitted_accepted_tokens", sum(spec_steps) - len(spec_steps))
        if reason is None:
            return
        ledger.add(f"request_success/{reason}")
        ledger.observe("end_to_end_s", self._clock() - entry.arrived)
        ledger.observe("request_prompt_tokens", entry.num_prompt_tokens)
        ledger.observe("request_generation_tokens", entry.num_earlier + entry.num_tokens)
        if entry.first_token is not None and entry.last_token is not None:
            spent = entry.last_token - entry.first_token
            ledger.observe("time_per_token_s", spent / (entry.num_tokens - 1) if entry.num_tokens > 1 else 0.0)
        if entry.max_tokens is not None:
            ledger.observe("params_max_tokens", entry.max_tokens)
        if entry.num_choices:
            ledger.observe("params_n", entry.num_choices)
        if spec_steps and reason in _DELIVERED:
            ledger.observe("acceptance_length", sum(spec_steps) / len(spec_steps))
