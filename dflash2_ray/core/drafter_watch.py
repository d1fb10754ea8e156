"""What a unit does about a separate drafter that its ranks have lost, or that hangs. Pure: times and states in, a verdict out."""

from typing import Any, Literal

APART_S = 8.0  # longer than an attempt to connect takes
Verdict = Literal["tell", "hung", "apart"]


class DrafterWatch:
    """Asked again and again: "tell" the ranks the drafter's address; it is "hung", or the ranks stay "apart" from it: replace it."""

    def __init__(self) -> None:
        self._told: tuple[int, str] | None = None  # generation of ranks and address, since they were last connected
        self._apart_since: float | None = None
        self._replaced: tuple[int, int] | None = (
            None  # the connection whose drafter was replaced; its pulse may be an old one
        )

    def look(self, now: float, generation: int, address: str | None, state: dict[str, Any] | None) -> Verdict | None:
        """now: seconds of a monotonic clock. generation: of the ranks. address: of the living drafter, None while there is none.
        state: what the ranks say of their draft port ("connected", "suspect", "connection"); None while they say nothing."""
        if not state or address is None:
            self._apart_since = None
            return None
        connection = (generation, int(state["connection"]))
        if state["suspect"] == "hung" and connection != self._replaced:
            self._replaced, self._apart_since = connection, None
            return "hung"
        if state["connected"]:
            self._told = self._apart_since = None
            return None
        if self._told != (generation, address):
            self._told, self._apart_since = (generation, address), now
            return "tell"
        if self._apart_since is not None and now - self._apart_since > APART_S:
            self._apart_since = None
            return "apart"
        return None
