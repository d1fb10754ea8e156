"""How often the streams of one front send: a piece costs Serve's proxy and the front about a millisecond, whatever it holds."""

from collections.abc import Iterator
from contextlib import contextmanager

_MOST_PIECES_PER_S = 400
WHOLE_HOLD_S = (
    0.5  # between looks at an answer that goes out in one piece: no token is lost with a unit but those since the last
)


class Pace:
    """Streams go on with every step while they are few, and take more steps into a piece the more they are."""

    def __init__(self) -> None:
        self._num_streams = 0

    @contextmanager
    def streams(self, count: int) -> Iterator[None]:
        """So many more streams, while this is open."""
        self._num_streams += count
        try:
            yield
        finally:
            self._num_streams -= count

    def hold_s(self) -> float:
        """Seconds from one piece of a stream to its next."""
        return self._num_streams / _MOST_PIECES_PER_S
