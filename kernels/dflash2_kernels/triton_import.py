"""The one place that imports Triton, if it is there. Without it kernels are still defined (as plain functions that nobody calls),
so every module imports on a machine that has only torch, and the references are the path."""

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

    class _NoLanguage:
        """What kernel definitions name outside their bodies."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    tl = _NoLanguage()

AVAILABLE = triton is not None
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1, set before the import


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, or the bare function where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel)


def ceil_div(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()
