"""Compiles kernels for GPUs that are not here, with Triton's own compiler, and reads what the machine code needs.

Every operator lists its `compile_cases()`; `compile_for` gives registers, spilled bytes, shared memory and occupancy. Triton keeps
the compiled code in its own cache on disk. Needs triton, and a process without TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash2_kernels.chips import Chip


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of one kernel, as its launcher would ask for it.

    signature: Triton types of the arguments that exist at run time ("*bf16", "i32", "fp32"), by name. constants: the
    `tl.constexpr` ones. divisible: integers that are multiples of 16 (pointers always are, as torch allocates them).
    fp_fusion: whether a·b + c may be rounded once; off by default, as the references round twice.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    divisible: Sequence[str] = ()
    fp_fusion: bool = False


@dataclass(frozen=True)
class Compiled:
    """What one case needs on one chip. spilled_bytes: local memory per thread."""

    case: CompileCase
    chip: Chip
    registers: int
    spilled_bytes: int
    shared_bytes: int
    occupancy: float

    @property
    def faults(self) -> list[str]:
        """Why the case must not be shipped; nothing where it may."""
        name, limit = f"{self.case.name}, sm_{self.chip.compute_capability}", self.chip.shared_bytes_per_program
        found = [f"{name}: {self.spilled_bytes} bytes per thread are spilled"] if self.spilled_bytes else []
        if self.shared_bytes > limit:
            found.append(f"{name}: expected at most {limit} bytes of shared memory, got {self.shared_bytes}")
        return found


def compile_for(case: CompileCase, chip: Chip) -> Compiled:
    """Compile one case for one chip. Raises RuntimeError where there is no compiler, and what Triton raises if it refuses."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise RuntimeError("compiling ahead of time needs triton: pip install 'dflash2-ray[triton]'") from error
    if triton.knobs.runtime.interpret:
        raise RuntimeError("compiling ahead of time needs a process without TRITON_INTERPRET")
    names = case.kernel.arg_names
    expected = {*case.signature, *case.constants}
    if expected != set(names):
        raise ValueError(f"{case.name}: expected types or values of {names}, got {sorted(expected)}")
    aligned = [name for name, kind in case.signature.items() if kind.startswith("*") or name in case.divisible]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.fp_fusion}
    built = triton.compile(source, target=GPUTarget("cuda", chip.compute_capability, 32), options=options)
    registers, local = _resources(triton.knobs.nvidia.cuobjdump.path, built.asm["cubin"])
    shared = built.metadata.shared
    return Compiled(case, chip, registers, local, shared, chip.occupancy(case.num_warps, registers, shared))


def _resources(cuobjdump: str, cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack and local memory per thread) of the kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump -res-usage: expected a line with REG, STACK and LOCAL, got {text!r}")
    return max(int(row[0]) for row in found), max(int(row[1]) + int(row[2]) for row in found)
