"""Every kernel compiles for sm_80, sm_90 and sm_100 without spilling and within the chip's shared memory; no GPU is needed."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from dflash2_kernels import catalogue
from dflash2_kernels.ahead_of_time import CompileCase, compile_for
from dflash2_kernels.chips import A100, B200, COMPILE_TARGETS, H100
from dflash2_kernels.triton_import import INTERPRETED, jit, tl

pytest.importorskip("triton", reason="compiling needs triton, which this environment lacks")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set: kernels are interpreted in this process")


@pytest.mark.parametrize("chip", COMPILE_TARGETS, ids=lambda chip: f"sm_{chip.compute_capability}")
@pytest.mark.parametrize("case", catalogue.compile_cases(), ids=lambda case: case.name)
def test_compiles_without_spills_and_fits(case, chip):
    built = compile_for(case, chip)
    assert not built.faults
    assert 0 < built.registers <= 255
    assert built.occupancy > 0


def test_the_readme_holds_what_the_compiler_says():
    root = Path(__file__).parents[2] / "kernels"
    spec = importlib.util.spec_from_file_location("resources", root / "bench" / "resources.py")
    resources = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resources)
    text = (root / "README.md").read_text(encoding="utf-8")
    rows = resources.table(resources.compiled()).splitlines()  # compiled above: this reads the compiler's cache
    assert [row for row in rows if row not in text.splitlines()] == []


def test_every_operator_is_compiled():
    names = {case.name.split()[0] for case in catalogue.compile_cases()}
    assert names == {module.OPERATOR.name for module in catalogue.MODULES}


@jit
def _greedy_for_registers(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * tl.sum(x, 0))  # every value is alive until the sum is known


def test_spills_are_seen():
    case = CompileCase(
        "spilling", _greedy_for_registers, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"SIZE": 16384}, num_warps=1
    )
    built = compile_for(case, A100)
    assert built.spilled_bytes > 0
    assert built.faults == [f"spilling, sm_80: {built.spilled_bytes} bytes per thread are spilled"]
    assert "got 999999" in replace(built, spilled_bytes=0, shared_bytes=999999).faults[0]


def test_a_case_must_name_every_argument():
    with pytest.raises(ValueError, match="incomplete"):
        compile_for(CompileCase("incomplete", _greedy_for_registers, {"x_ptr": "*fp32"}, {"SIZE": 16}), H100)


@pytest.mark.parametrize(
    ("chip", "num_warps", "registers", "shared", "resident"),
    [
        (H100, 4, 32, 0, 16),  # all 64 warps
        (H100, 4, 128, 0, 4),  # 65536 registers / (128 · 128)
        (H100, 8, 255, 0, 1),
        (H100, 4, 33, 0, 12),  # 33 registers are given out as 40
        (A100, 4, 32, 80 * 1024, 2),
        (A100, 4, 32, 82 * 1024, 1),  # 1 KiB per program is the driver's
        (B200, 1, 16, 0, 32),
        (B200, 4, 32, 227 * 1024, 1),
        (B200, 4, 32, 228 * 1024, 0),
    ],
)
def test_resident_programs(chip, num_warps, registers, shared, resident):
    assert chip.resident_programs(num_warps, registers, shared) == resident
    assert chip.occupancy(num_warps, registers, shared) == resident * num_warps / 64
