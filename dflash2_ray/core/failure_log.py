"""The first failure once: a failure that repeats is logged once per window, and its repeats as one line that counts them.

    ERROR the drafter failed; 3 requests go on as plain decoding
    ERROR … and 37 more of the same in 60 s: the drafter failed; 3 requests go on as plain decoding

It must not know who fails, nor how lines are written.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WINDOW_S = 60.0
_MOST_KINDS = (
    64  # with an open window; more are taken for one kind, so that texts that never repeat cannot flood either
)
Later = Callable[[float, Callable[[], None]], object]


@dataclass(slots=True)
class _Window:
    """One kind of failure since its line: `line` as it was logged, `num_more` repeats."""

    opened: float
    level: int
    line: str
    extra: dict[str, Any]
    num_more: int = 0


def _in_a_thread(delay_s: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, call)
    timer.daemon = True
    timer.start()


class FailureLog:
    """`error`, `warning` and `exception` are the logger's own, but for repeats. `kind` says what is the same: by default the message
    before its arguments go in. later(seconds, call): calls once, so much later; asked only when something repeats. Thread-safe.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
        later: Later = _in_a_thread,
    ) -> None:
        self._logger = logger
        self._window_s = window_s
        self._clock = clock
        self._later = later
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def error(self, message: str, *args: object, kind: str | None = None, **extra: object) -> None:
        """Log an error, or count it. `extra`: fields of a JSON line."""
        self._report(logging.ERROR, message, args, kind, extra, traced=False)

    def warning(self, message: str, *args: object, kind: str | None = None, **extra: object) -> None:
        """Log a warning, or count it."""
        self._report(logging.WARNING, message, args, kind, extra, traced=False)

    def exception(self, message: str, *args: object, kind: str | None = None, **extra: object) -> None:
        """Log an error with the traceback of the exception in hand, or count it."""
        self._report(logging.ERROR, message, args, kind, extra, traced=True)

    def _report(
        self, level: int, message: str, args: tuple[object, ...], kind: str | None, extra: dict[str, Any], traced: bool
    ) -> None:
        if self._is_first(kind or message, level, lambda: message % args if args else message, extra):
            self._logger.log(level, message, *args, exc_info=traced, extra=extra, stacklevel=3)

    def _is_first(self, kind: str, level: int, line: Callable[[], str], extra: dict[str, Any]) -> bool:
        with self._lock:
            now = self._clock()
            for past in [
                name
                for name, window in self._windows.items()
                if not window.num_more and now - window.opened >= self._window_s
            ]:
                del self._windows[past]  # nothing to tell of it; one with repeats is told by its own timer
            if kind not in self._windows and len(self._windows) >= _MOST_KINDS:
                kind = ""
            window = self._windows.get(kind)
            if window is None:
                self._windows[kind] = _Window(now, level, line(), extra)
                return True
            window.num_more += 1
            if window.num_more > 1:
                return False
            rest = max(0.0, window.opened + self._window_s - now)
        self._later(rest, lambda: self._tell(kind))
        return False

    def _tell(self, kind: str) -> None:
        """The end of a window with repeats: the next failure of its kind is a first one again."""
        with self._lock:
            window = self._windows.pop(kind)
            seconds = self._clock() - window.opened
        self._logger.log(
            window.level,
            "… and %d more of the same in %.0f s: %s",
            window.num_more,
            seconds,
            window.line,
            extra=window.extra,
        )
