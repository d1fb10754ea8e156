"""What all units of a service have counted together, and still stands when units come and go.

Units report growth, not totals, so nothing has to be remembered of a unit that is gone; every report has a number, so one that is
sent again is taken once. Copies (`state`) are kept elsewhere and joined again after a loss. Pure; it must not know how reports travel.
"""

from collections.abc import Mapping
from typing import Any

from dflash2_ray.core.ledger import Numbers, add_up

_MOST_SOURCES = 1024  # whose report numbers are remembered


class Books:
    """totals: numbers by engine, the index of a unit among the units. version: reports taken so far, predecessors' included. facts: of the
    newest report: `model`, `num_speculative_tokens`, `max_model_len`, `most_tokens_per_step`, `sglang` (whether its names are exported)."""

    def __init__(self) -> None:
        self.version = 0
        self.totals: dict[str, Numbers] = {}
        self.facts: dict[str, Any] = {}
        self._newest: dict[str, int] = {}

    def take(
        self, source: str, engine: str, number: int, growth: Mapping[str, float], facts: Mapping[str, Any]
    ) -> None:
        """One report of a unit. `source` names its process; numbers rise."""
        if number <= self._newest.get(source, -1):
            return
        self._newest.pop(source, None)
        self._newest[source] = number
        if len(self._newest) > _MOST_SOURCES:
            del self._newest[next(iter(self._newest))]
        add_up(self.totals.setdefault(engine, {}), growth)
        self.facts = dict(facts)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """A copy as plain values."""
        totals = {engine: dict(numbers) for engine, numbers in self.totals.items()}
        return {"version": self.version, "totals": totals, "facts": dict(self.facts), "newest": dict(self._newest)}

    def join(self, state: Mapping[str, Any]) -> None:
        """Take up a copy of the same books: whatever it says that is more than what is here. So nothing goes back and nothing counts twice."""
        for engine, numbers in state["totals"].items():
            own = self.totals.setdefault(engine, {})
            for key, value in numbers.items():
                own[key] = max(value, own.get(key, 0))
        for source, number in state["newest"].items():
            self._newest[source] = max(number, self._newest.get(source, -1))
        if state["version"] > self.version or not self.facts:
            self.facts = dict(state["facts"])
        self.version = max(self.version, state["version"])
