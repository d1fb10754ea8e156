"""Which implementation an operator uses on a device: the one place that decides, the same for every call of a process.

A CUDA tensor goes to the operator's library (where one is named and installed) or to its Triton kernel; a CPU tensor goes to the
torch reference, or to the kernel in Triton's interpreter if the process was started with TRITON_INTERPRET=1. It must not know
what any operator computes.
"""

import functools
import importlib.util
from dataclasses import dataclass

import torch

from dflash2_kernels import triton_import

REFERENCE = "torch reference"
TRITON = "triton"
INTERPRETER = "triton interpreter"


@dataclass(frozen=True)
class Operator:
    """One operator's choice. libraries: importable packages that beat the kernel on CUDA, best first. interpretable: its kernel
    runs in Triton's interpreter."""

    name: str
    libraries: tuple[str, ...] = ()
    interpretable: bool = True

    def implementation(self, device: torch.device | str) -> str:
        """`torch reference`, `triton`, `triton interpreter` or the name of a library."""
        return _choose(self, torch.device(device).type)

    def has_kernel(self, device: torch.device | str) -> bool:
        """Whether tensors on a device go to the Triton kernel."""
        return self.implementation(device) in (TRITON, INTERPRETER)

    def uses_kernel(self, *tensors: torch.Tensor) -> bool:
        """`has_kernel` of the device that they are on. Raises ValueError if they are on several."""
        device = tensors[0].device
        if any(one.device != device for one in tensors):
            raise ValueError(
                f"{self.name}: expected tensors on one device, got {sorted({str(one.device) for one in tensors})}"
            )
        return self.has_kernel(device)


@functools.cache
def _choose(operator: Operator, device_type: str) -> str:
    if triton_import.INTERPRETED:
        return INTERPRETER if operator.interpretable else REFERENCE
    if device_type != "cuda":
        return REFERENCE
    for library in operator.libraries:
        if importlib.util.find_spec(library) is not None:
            return library
    return TRITON if triton_import.AVAILABLE else REFERENCE
