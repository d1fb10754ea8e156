"""Finds the end of a text at a stop string, character by character: the result depends on the text alone, not on its pieces.

The stop string that is complete first ends the text; among those complete at the same character, the longest. What may still
become a stop string is held back. It must not know tokens.
"""

from collections.abc import Sequence


class StopMatcher:
    """One per text. `include`: the stop string itself stays in the text."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that ended it). `armed`: False lets stop strings that end in `text` pass."""
        start = len(self._held)
        self._held += text
        for end in range(start + 1, len(self._held) + 1) if armed else ():
            for stop in self._stops:
                if self._held.endswith(stop, 0, end):
                    shown = self._held[: end if self._include else end - len(stop)]
                    self._held = ""
                    return shown, stop
        keep = max((size for stop in self._stops for size in [_overlap(self._held, stop)]), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
