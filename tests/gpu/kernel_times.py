"""Part: every operator at real shapes: equal to its reference, and how near it comes to the memory's peak.

Times are of calls inside one CUDA graph, on operands in turn whose sizes exceed the L2 cache: no launch overhead, no cache that a real
step would not have. `fraction`: the least time that the chip's data sheet allows over the measured one.
"""

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import Case, cases
from part_script import PartScript
from sizes import sizes

from dflash2_kernels.catalogue import report
from dflash2_kernels.chips import CHIPS, Chip

_COLD_BYTES = 256 << 20  # of operands in turn: above every L2
_MOST_COPIES = 16
_REPEATS = 5


def main() -> None:
    part = PartScript()
    chip = None if part.rehearsal else find_chip(torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"status": "failed", "implementations": report(part.device), "kernels": rows, "cut": []}
    for case in cases(sizes(part.rehearsal), part.device):
        if part.left_s < 5:
            result["cut"].append(f"{case.operator} {case.shape}")
            continue
        rows.append(_row(case, chip, part.device))
        part.write(result)
    result["status"] = (
        "passed" if rows and all(row["equal"] is not False and "error" not in row for row in rows) else "failed"
    )
    part.write(result)


def find_chip(name: str) -> Chip | None:
    """By a word of the name that the driver gives, with the rates of the SXM board; None for one that `chips.py` does not know."""
    return next((chip for chip in CHIPS if chip.name in re.split(r"[\s-]+", name)), None)


def _row(case: Case, chip: Chip | None, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "operator": case.operator, "shape": case.shape, "equal": None, "us": None, "gb_per_s": None, "fraction": None, "timed_by": None,
    }  # fmt: skip
    try:
        if case.checked:
            row["equal"] = _equal(case)
        seconds, row["timed_by"] = _seconds(case, device)
        row["us"] = seconds * 1e6
        row["gb_per_s"] = case.traffic.minimum_bytes / seconds / 1e9
        row["fraction"] = case.traffic.least_time_s(chip) / seconds if chip else None
    except Exception as error:  # the next operator is measured all the same, if the context survived
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    return row


def _equal(case: Case) -> bool:
    operands = case.operands()
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in operands]
    got, expected = case.call(*operands), case.reference(*copies)
    pairs = zip(*((one,) if isinstance(one, torch.Tensor) else one for one in (got, expected)), strict=True)
    return all(_near(one, other, case.tolerance) for one, other in pairs)


def _near(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if not one.is_floating_point() or tolerance == 0:
        return bool(torch.equal(one, other.to(one.dtype)))
    return bool(torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance))


def _seconds(case: Case, device: str) -> tuple[float, str]:
    """(time of one call, what it was measured by)."""
    count = max(1, min(_MOST_COPIES, _COLD_BYTES // max(1, case.traffic.minimum_bytes))) if device == "cuda" else 1
    operands = [case.operands() for _ in range(count)]
    if device != "cuda":
        started = time.perf_counter()
        case.call(*operands[0])
        return time.perf_counter() - started, "clock"

    def round_of_calls() -> None:
        for own in operands:
            case.call(*own)

    round_of_calls()  # compiles
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_of_calls()
        return _median_s(graph.replay) / count, "graph"
    except RuntimeError:  # something in it asks the host
        torch.cuda.synchronize()
        return _median_s(round_of_calls) / count, "events"


def _median_s(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return sorted(times[1:])[_REPEATS // 2]


if __name__ == "__main__":
    main()
