"""What a front knows of units whose places are all taken, so that it can refuse at its own door. Pure; it must not know sockets.

A unit says when its last place is taken and when one is free again, so what is known here is as old as a frame on its way. A request
is refused here only when every running unit is known to be full; one that is not known is asked.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dflash2_ray.core.places import retry_after_s
from dflash2_ray.errors import Overloaded


class FullUnits:
    """By the names that Serve gives its replicas."""

    def __init__(self) -> None:
        self._notices: dict[str, Mapping[str, Any]] = {}
        self._num_refused: dict[str, int] = {}  # here, since the notice

    def told(self, unit: str, notice: Mapping[str, Any] | None) -> None:
        """The unit's `Places.notice`: None says that a place is free there."""
        self.forget(unit)
        if notice is not None:
            self._notices[unit], self._num_refused[unit] = notice, 0

    def forget(self, unit: str) -> None:
        """Nothing is heard of the unit any more."""
        self._notices.pop(unit, None)
        self._num_refused.pop(unit, None)

    def refuse(self, running: Collection[str]) -> tuple[str, Overloaded] | None:
        """The unit with the shortest wait and the refusal in its name, if all that run are full; None: ask them."""
        if not running or not all(unit in self._notices for unit in running):
            return None
        unit = min(running, key=self._wait_s)
        wait_s = self._wait_s(unit)
        self._num_refused[unit] += 1
        return unit, Overloaded(self._notices[unit]["message"], retry_after_s=wait_s)

    def _wait_s(self, unit: str) -> float:
        """Of the client that is refused next."""
        notice = self._notices[unit]
        return retry_after_s(notice["interval_s"], notice["num_refused"] + self._num_refused[unit] + 1)
