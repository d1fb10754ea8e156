"""The choice of an implementation: references on CPUs, and everywhere where there is no Triton."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash2_kernels import backend, catalogue, triton_import
from dflash2_kernels.backend import Operator

WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import torch, dflash2_kernels
for module in pkgutil.iter_modules(dflash2_kernels.__path__):
    importlib.import_module("dflash2_kernels." + module.name)
from dflash2_kernels import catalogue
from dflash2_kernels.ahead_of_time import compile_for
from dflash2_kernels.chips import H100
from dflash2_kernels.grouped_conv import grouped_conv
import dflash2_ray.models.dflash2
for device in ("cpu", "cuda"):
    assert set(catalogue.report(device).values()) <= {"torch reference", *sys.argv[1:]}, catalogue.report(device)
assert grouped_conv(torch.ones(1, 2, 4), torch.ones(1, 2, 2, 2), torch.ones(2, 4)).tolist() == [[[2.0] * 4, [4.0] * 4]]
list(catalogue.traffic_cases())
try:
    compile_for(next(catalogue.compile_cases()), H100)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def fresh_choice():
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()


def test_every_module_imports_and_works_without_triton():
    libraries = {library for module in catalogue.MODULES for library in module.OPERATOR.libraries}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, *libraries], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "dflash2-ray[triton]" in done.stdout


def test_nothing_but_two_places_imports_triton():
    package = Path(backend.__file__).parent
    importing = {
        path.name
        for path in package.rglob("*.py")
        if "import triton\n" in path.read_text() or "from triton" in path.read_text()
    }
    assert importing == {"triton_import.py", "ahead_of_time.py"}


def test_cpu_tensors_take_the_reference():
    assert set(catalogue.report("cpu").values()) == {"torch reference"}
    assert not Operator("some").uses_kernel(torch.ones(1))


def test_cuda_takes_the_library_that_is_installed_else_the_kernel(monkeypatch, fresh_choice):
    monkeypatch.setattr(triton_import, "AVAILABLE", True)
    assert Operator("some", ("not_installed_anywhere",)).implementation("cuda:1") == "triton"
    assert Operator("some", ("not_installed_anywhere", "json")).implementation("cuda") == "json"
    assert Operator("some", ("json",)).implementation("cpu") == "torch reference"
    monkeypatch.setattr(triton_import, "AVAILABLE", False)
    assert Operator("other").implementation("cuda") == "torch reference"


def test_the_interpreter_is_for_kernels_that_bear_it(monkeypatch, fresh_choice):
    monkeypatch.setattr(triton_import, "INTERPRETED", True)
    assert Operator("some").implementation("cpu") == "triton interpreter"
    assert Operator("some", interpretable=False).implementation("cpu") == "torch reference"


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"some: expected tensors on one device, got \['cpu', 'meta'\]"):
        Operator("some").uses_kernel(torch.ones(1), torch.ones(1, device="meta"))
