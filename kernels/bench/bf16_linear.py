"""Milliseconds for all matrices of SmolLM2-135M (269 MB), by rows: `bf16_linear` and torch's oneDNN-ordered product, in turns."""

import statistics
import time
from collections.abc import Callable

import torch

from dflash2_kernels.bf16_linear import Bf16Linear

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
REPEATS = 7


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    """Print one line per number of rows: medians, and the median of paired ratios."""
    torch.set_num_threads(1)
    weights = [torch.randn(shape).bfloat16() for shape in SHAPES]
    own = [Bf16Linear(weight) for weight in weights]
    ordered = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
    multiply = torch.ops.mkldnn._linear_pointwise.default
    for rows in ROWS:
        x = {width: torch.randn(rows, width) for width in (576, 1536)}

        def run_own(x=x) -> None:  # type: ignore[no-untyped-def]
            for one in own:
                one(x[one.num_inputs])

        def run_ordered(x=x) -> None:  # type: ignore[no-untyped-def]
            for weight, one in zip(weights, ordered, strict=True):
                multiply(x[weight.shape[1]].bfloat16(), one, None, "none", [], "")

        pairs = [(seconds(run_own), seconds(run_ordered)) for _ in range(REPEATS + 1)][1:]
        mine, other = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
        print(
            f"{rows:4} rows: {mine:6.1f} ms, oneDNN {other:6.1f} ms, ratio {statistics.median(a / b for a, b in pairs):.2f}"
        )


if __name__ == "__main__":
    main()
