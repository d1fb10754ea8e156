"""Prints what every operator moves and computes per call, and the time it takes at least on each chip: modelled, not measured.

python kernels/bench/traffic.py
"""

from dflash2_kernels.catalogue import traffic_cases
from dflash2_kernels.chips import CHIPS


def table() -> str:
    """The table of kernels/README.md, in Markdown."""
    times = " | ".join(f"{chip.name} ≥ µs" for chip in CHIPS)
    lines = [f"| operator | shape | MB read | MB written | MB least | moved / least | MFLOP | {times} | of the limit |"]
    lines.append("| --- | --- |" + " ---: |" * (6 + len(CHIPS)))
    for case in traffic_cases():
        one = case.traffic
        moved = [f"{value / 1e6:.3f}" for value in (one.read_bytes, one.written_bytes, one.minimum_bytes)]
        limits = [f"{one.least_time_s(chip) * 1e6:.2f}" for chip in CHIPS]
        fraction = min(one.modelled_fraction(chip) for chip in CHIPS)
        cells = [
            case.operator,
            case.shape,
            *moved,
            f"{one.ratio:.2f}",
            f"{one.flops / 1e6:.2f}",
            *limits,
            f"{fraction:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    reasons = dict.fromkeys(f"{case.operator}: {case.explanation}" for case in traffic_cases() if case.explanation)
    return "\n".join([*lines, *(f"\n{reason}" for reason in reasons)])


if __name__ == "__main__":
    print(table())
