"""How often each draft slot is accepted, given that the slots before it were: counted from finished steps, forgetting slowly.

A count enters only when its step has been committed, so whoever reads it decides about later steps with tokens that are
drawn already. It must not know requests, widths to come or times.
"""

from collections.abc import Sequence

_PRIOR = 0.75  # of a slot, before anything was seen: a typical drafter, so that the first choice follows the times
_PRIOR_BLOCKS = 4.0
_MEMORY_BLOCKS = 512.0


class Acceptance:
    """Conditional acceptance of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._reached = [0.0] * num_slots
        self._accepted = [0.0] * num_slots

    def observe(self, num_drafts: int, num_accepted: int, count: int = 1) -> None:
        """`count` verified blocks, all alike: slots up to the first rejected one were decided, the others were not."""
        for slot in range(min(num_drafts, num_accepted + 1, self.num_slots)):
            self._reached[slot] += count
            self._accepted[slot] += count * (slot < num_accepted)
            while self._reached[slot] > _MEMORY_BLOCKS:  # halve: what is old weighs less and less
                self._reached[slot] /= 2
                self._accepted[slot] /= 2

    def by_slot(self) -> tuple[float, ...]:
        """a_k of every slot; where little was seen, drawn towards the slot before it."""
        values = []
        before = _PRIOR
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            before = (accepted + _PRIOR_BLOCKS * before) / (reached + _PRIOR_BLOCKS)
            values.append(before)
        return tuple(values)


def survival(by_slot: Sequence[float]) -> tuple[float, ...]:
    """S_j: probability that slots 1 … j are all accepted."""
    product, values = 1.0, []
    for one in by_slot:
        product *= one
        values.append(product)
    return tuple(values)
