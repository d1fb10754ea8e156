"""How long a step may wait for its drafts: a fixed limit, or one that follows the measured proposal times. Pure arithmetic."""

_WEIGHT = 0.2  # of the newest sample
_FACTOR = 3.0
FLOOR_S = 0.02  # below it, a busy machine's wake-ups alone would make drafts late
FIRST_S = 2.0  # a drafter that has not answered yet compiles, or takes in long prompts


class DraftDeadline:
    """`limit_s`: `fixed_s` where that is set; `first_s` before any sample; then `max(floor_s, 3 × moving average)`."""

    def __init__(self, fixed_s: float | None = None, *, floor_s: float = FLOOR_S, first_s: float = FIRST_S) -> None:
        self._fixed_s, self._floor_s, self._first_s = fixed_s, floor_s, first_s
        self.average_s: float | None = None

    def observe(self, seconds: float) -> None:
        """One measured proposal time, late ones included."""
        self.average_s = seconds if self.average_s is None else self.average_s + _WEIGHT * (seconds - self.average_s)

    def restart(self) -> None:
        """Another drafter: nothing is known of it."""
        self.average_s = None

    @property
    def limit_s(self) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        if self.average_s is None:
            return self._first_s
        return max(self._floor_s, _FACTOR * self.average_s)
