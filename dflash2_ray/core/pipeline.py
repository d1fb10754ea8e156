"""The rules of a split running set: when to start without the other half, who belongs to which half, what a wait tells.

While the target verifies one half, the drafter drafts the other. Pure functions over times and counts; they must not know
requests, ports or clocks.
"""

from collections.abc import Callable, Mapping, Sequence

_NOTICEABLE_S = 0.0002  # a collect that took less did not wait for the drafter


def holds(
    wait_s: float,
    ready: tuple[int, int],
    pending: tuple[int, int],
    verify_s: Callable[[float, float], float | None],
) -> bool:
    """The hold rule: whether the target, free now, should wait for the proposals of the other half and run both at once.

    ready, pending: (requests, rows) with proposals, and without. Waiting costs `wait_s`; starting now costs a second pass,
    α = T_v(ready) + T_v(pending) - T_v(both). Unknown times: start.
    """
    if not ready[0] or not pending[0]:
        return False
    alone, rest = verify_s(*ready), verify_s(*pending)
    both = verify_s(ready[0] + pending[0], ready[1] + pending[1])
    if alone is None or rest is None or both is None:
        return False
    return wait_s <= alone + rest - both


def balance(running: Sequence[str], groups: Mapping[str, int]) -> dict[str, int]:
    """The half (0 or 1) of every running request: known ones stay, new ones join the smaller half, and the newest of the
    larger half move over until the two differ by one at most. Requests that left are forgotten."""
    halves: tuple[list[str], list[str]] = ([], [])
    for request_id in running:
        group = groups.get(request_id)
        if group is None:
            group = int(len(halves[1]) < len(halves[0]))
        halves[group].append(request_id)
    small, large = sorted(halves, key=len)
    while len(large) - len(small) > 1:
        small.append(large.pop())
    return {request_id: index for index, half in enumerate(halves) for request_id in half}


def draft_time(asked_at: float, collect_started: float, collect_ended: float, expected_s: float | None) -> float | None:
    """What one collect tells about the time from asking to having: all of it when the target had to wait, an upper bound
    when it had not (worth something only below what is expected, or when nothing is); None when it tells nothing."""
    elapsed = collect_ended - asked_at
    waited = collect_ended - collect_started
    if waited >= _NOTICEABLE_S or expected_s is None or elapsed < expected_s:
        return elapsed
    return None
