"""What GPUs can do: peak rates for models of time, and the per-SM limits that decide how many programs are resident.

Rates: NVIDIA's data sheets (SXM boards, dense bf16). Limits per compute capability: CUDA C++ Programming Guide, "Technical
specifications per compute capability".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Rates in bytes/s and FLOP/s; sizes in bytes; registers are 32 bits wide."""

    name: str
    compute_capability: int
    num_sms: int
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    shared_bytes_per_program: int
    shared_bytes_per_sm: int
    registers_per_sm: int = 65536
    warps_per_sm: int = 64
    programs_per_sm: int = 32

    def resident_programs(self, num_warps: int, registers: int, shared_bytes: int) -> int:
        """How many programs one SM holds at once, each of `num_warps` warps, `registers` per thread and `shared_bytes`."""
        quarter = (
            self.registers_per_sm // 4
        )  # an SM has four schedulers; a warp's registers lie with one, in units of 256
        per_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = quarter // per_warp * 4 // num_warps
        own_shared = -(-shared_bytes // 128) * 128 + 1024  # the driver keeps 1 KiB of its own per program
        by_shared = self.shared_bytes_per_sm // own_shared
        return min(self.programs_per_sm, self.warps_per_sm // num_warps, by_registers, by_shared)

    def occupancy(self, num_warps: int, registers: int, shared_bytes: int) -> float:
        """Resident warps as a share of what an SM can hold."""
        return self.resident_programs(num_warps, registers, shared_bytes) * num_warps / self.warps_per_sm


_KIB = 1024
A100 = Chip("A100", 80, 108, 2.039e12, 312e12, 163 * _KIB, 164 * _KIB)
H100 = Chip("H100", 90, 132, 3.35e12, 989e12, 227 * _KIB, 228 * _KIB)
H200 = Chip("H200", 90, 132, 4.8e12, 989e12, 227 * _KIB, 228 * _KIB)
B200 = Chip("B200", 100, 148, 8.0e12, 2250e12, 227 * _KIB, 228 * _KIB)
CHIPS = (A100, H100, H200, B200)
COMPILE_TARGETS = (A100, H100, B200)  # one per instruction set: sm_80, sm_90, sm_100
