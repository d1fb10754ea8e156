"""How many requests a unit takes in: bounded by number, and by the prompt tokens that wait to be computed.

A unit whose places are all taken says so to its fronts (`Places.notice`), which then refuse on its behalf (`core.full_units`).
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dflash2_ray.errors import Overloaded

_SHORTEST_S, _LONGEST_S = 0.1, 60.0  # of what a refused client is told to wait
_UNMEASURED_S = 1.0
_NUM_MEASURED = 32
_BY_NUMBER = "max_num_queued_reqs"


class Places:
    """max_requests: that run or wait. max_queued_tokens: prompt tokens of those without a first token; one request alone always fits.

    clock: seconds. on_change: called whenever the last place is taken and when one is free again.
    """

    def __init__(
        self,
        max_requests: int,
        max_queued_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_requests = 0
        self.num_queued_tokens = 0
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self.clock = clock
        self._on_change = on_change
        self._freed: deque[float] = deque(maxlen=_NUM_MEASURED)  # when requests left
        self._num_refused = 0  # since places were last free for all
        self.num_rejected: Counter[str] = Counter()  # by which limit, since the start
        self.waiting: dict[Place, float] = {}  # without a first token, oldest first: since when

    def limit(self, max_requests: int, max_queued_tokens: int) -> None:
        """Other limits from now on; who has a place keeps it."""
        was_full = self._full
        self._max_requests, self._max_queued_tokens = max_requests, max_queued_tokens
        if self._full != was_full:
            self._on_change()

    @property
    def _full(self) -> bool:
        return self.num_requests >= self._max_requests

    def notice(self) -> dict[str, Any] | None:
        """What a front refuses with on this unit's behalf, as plain values; None while a place is free. message; interval_s: between places
        that were freed lately; num_refused: since the last one was."""
        if not self._full:
            return None
        return {"message": self._full_message(), "interval_s": self._interval_s(), "num_refused": self._num_refused}

    def refused_elsewhere(self, count: int) -> None:
        """So many were refused by a front that had the notice."""
        self._num_refused += count
        self.num_rejected[_BY_NUMBER] += count

    @property
    def queue_wait_s(self) -> float:
        """Age of the oldest request without a first token; 0 without one."""
        return self.clock() - next(iter(self.waiting.values())) if self.waiting else 0.0

    def enter(self, num_tokens: int) -> "Place":
        """A place for a prompt of `num_tokens`. Raises Overloaded with the time after which one should be free, by the rate at which
        requests have left lately; the second that is refused is told to wait for the second place, and so on."""
        if self._full:
            reason, message = _BY_NUMBER, self._full_message()
        elif self.num_queued_tokens and self.num_queued_tokens + num_tokens > self._max_queued_tokens:
            reason = "max_num_queued_tokens"
            message = _message(
                f"{self.num_queued_tokens} prompt tokens wait, {num_tokens} more are beyond max_queued_tokens={self._max_queued_tokens}"
            )
        else:
            self._num_refused = 0
            place = Place(self, num_tokens)
            if self._full:
                self._on_change()
            return place
        self._num_refused += 1
        self.num_rejected[reason] += 1
        raise Overloaded(message, retry_after_s=retry_after_s(self._interval_s(), self._num_refused))

    def left(self) -> None:
        """A place was freed."""
        self._freed.append(self.clock())
        self._num_refused = max(0, self._num_refused - 1)
        if self.num_requests == self._max_requests - 1:
            self._on_change()

    def _full_message(self) -> str:
        return _message(
            f"{self.num_requests} requests run or wait (max_num_seqs + max_queued_requests = {self._max_requests})"
        )

    def _interval_s(self) -> float:
        """Between requests that left lately."""
        now = self.clock()
        lately = [at for at in self._freed if now - at <= _LONGEST_S]
        return (now - lately[0]) / len(lately) if lately else _UNMEASURED_S


def retry_after_s(interval_s: float, num_refused: int) -> float:
    """When the client that was refused as number `num_refused` should ask again, where a place is freed every `interval_s`."""
    return min(max(interval_s * num_refused, _SHORTEST_S), _LONGEST_S)


def _message(what: str) -> str:
    return f"the queue is full: {what}; retry later"


class Place:
    """One request's. `started`: it has its first token; `leave`: it is over. Both may be said again."""

    def __init__(self, places: Places, num_tokens: int) -> None:
        self._places = places
        self._num_tokens = num_tokens
        self._taken = True
        places.num_requests += 1
        places.num_queued_tokens += num_tokens
        places.waiting[self] = places.clock()

    def started(self) -> None:
        """Its prompt waits no more."""
        if self._places.waiting.pop(self, None) is not None:
            self._places.num_queued_tokens -= self._num_tokens

    def leave(self) -> None:
        """Free it."""
        if self._taken:
            self._taken = False
            self.started()
            self._places.num_requests -= 1
            self._places.left()
