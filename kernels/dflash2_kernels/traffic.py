"""Bytes and operations of one call of an operator, and what they cost at least on a chip. Modelled, never measured."""

from dataclasses import dataclass

from dflash2_kernels.chips import Chip


@dataclass(frozen=True)
class Traffic:
    """read_bytes, written_bytes: what the kernel's programs ask of global memory, every load counted, caches given no credit
    unless the operator's `<op>_traffic` says so. minimum_bytes: every input read once and every output written once.
    flops: multiplications and additions."""

    read_bytes: int
    written_bytes: int
    minimum_bytes: int
    flops: int

    @property
    def ratio(self) -> float:
        """Modelled bytes over the minimum: 1 is perfect."""
        return (self.read_bytes + self.written_bytes) / self.minimum_bytes

    def least_time_s(self, chip: Chip) -> float:
        """The physical limit: the longer of the minimum's bytes at peak bandwidth and the operations at the peak rate."""
        return max(self.minimum_bytes / chip.memory_bytes_per_s, self.flops / chip.bf16_flops_per_s)

    def modelled_fraction(self, chip: Chip) -> float:
        """The limit over the time that the modelled bytes take at peak bandwidth: at most 1; launch and latency are not in it."""
        moved = (self.read_bytes + self.written_bytes) / chip.memory_bytes_per_s
        return self.least_time_s(chip) / max(moved, self.flops / chip.bf16_flops_per_s)


@dataclass(frozen=True)
class TrafficCase:
    """One row of the table. explanation: why the modelled bytes exceed 1.15 times the minimum, where they do."""

    operator: str
    shape: str
    traffic: Traffic
    explanation: str = ""
