"""Prints what every kernel needs on each chip, compiled ahead of time: the machine code is real, no GPU is asked. Exit code 1 where a
kernel spills registers or wants more shared memory than there is.

    python kernels/bench/resources.py
"""

import sys

from dflash2_kernels.ahead_of_time import Compiled, compile_for
from dflash2_kernels.catalogue import compile_cases
from dflash2_kernels.chips import COMPILE_TARGETS


def compiled() -> list[list[Compiled]]:
    """Every case on every chip of `COMPILE_TARGETS`, in order."""
    return [[compile_for(case, chip) for chip in COMPILE_TARGETS] for case in compile_cases()]


def table(rows: list[list[Compiled]]) -> str:
    """The table of kernels/README.md, in Markdown."""
    chips = " | ".join(f"sm_{chip.compute_capability}" for chip in COMPILE_TARGETS)
    lines = [f"| kernel | warps | {chips} |", "| --- | ---: |" + " --- |" * len(COMPILE_TARGETS)]
    lines += [f"| {row[0].case.name} | {row[0].case.num_warps} | {' | '.join(map(_needs, row))} |" for row in rows]
    return "\n".join(lines)


def _needs(one: Compiled) -> str:
    spilled = f" · **{one.spilled_bytes} B spilled**" if one.spilled_bytes else ""
    return f"{one.registers} · {one.shared_bytes / 1024:.1f} KiB · {one.occupancy:.0%}{spilled}"


if __name__ == "__main__":
    rows = compiled()
    print(table(rows))
    sys.exit("\n".join(fault for row in rows for one in row for fault in one.faults) or 0)
