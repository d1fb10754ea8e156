"""The model of bytes: no operator moves more than 1.15 times the least without saying why, and the README holds the table."""

import subprocess
import sys
from pathlib import Path

import pytest

from dflash2_kernels import catalogue
from dflash2_kernels.chips import H100
from dflash2_kernels.grouped_conv import grouped_conv_traffic
from dflash2_kernels.traffic import Traffic

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", catalogue.traffic_cases(), ids=lambda case: f"{case.operator} {case.shape}")
def test_moves_little_more_than_it_must(case):
    assert case.traffic.ratio >= 1
    assert (case.traffic.ratio <= 1.15) != bool(case.explanation)


def test_every_operator_has_a_model():
    assert {case.operator for case in catalogue.traffic_cases()} == {
        module.OPERATOR.name for module in catalogue.MODULES
    }


def test_limits_and_fractions():
    memory_bound = Traffic(read_bytes=3_350_000, written_bytes=3_350_000, minimum_bytes=3_350_000, flops=1000)
    assert memory_bound.least_time_s(H100) == pytest.approx(1e-6)
    assert memory_bound.modelled_fraction(H100) == pytest.approx(0.5)
    compute_bound = Traffic(read_bytes=2, written_bytes=2, minimum_bytes=2, flops=989_000_000)
    assert compute_bound.least_time_s(H100) == pytest.approx(1e-6)
    assert compute_bound.modelled_fraction(H100) == pytest.approx(1.0)


def test_grouped_conv_by_hand():
    one = grouped_conv_traffic(num_blocks=3, width=7, channels=128, groups=8, taps=2, itemsize=2)
    # 21 rows in tiles of 16 and 5; the second tile starts inside a block (16 % 7 = 2), so one row of x is read twice
    assert one.read_bytes == 2 * ((21 + 1) * 128 + 21 * 2 * 8 + 2 * 2 * 128)
    assert one.written_bytes == 2 * 21 * 128
    assert one.minimum_bytes == 2 * (2 * 21 * 128 + 21 * 2 * 8 + 2 * 128)


def test_the_readme_holds_what_the_program_prints():
    printed = subprocess.run(
        [sys.executable, ROOT / "kernels" / "bench" / "traffic.py"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() in (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
