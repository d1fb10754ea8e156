"""Runs the parts, and writes gpu.json and gpu.md. Exit code 0: every part passed; 1: one failed or was cut; 2: no GPU."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parts import PARTS, run_parts
from table import page

_ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run")
    parser.add_argument("--dry-run", action="store_true", help="on CPUs, with tiny shapes and Triton's interpreter")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--budget-s", type=float, default=340.0, help="what does not fit is cut, and says so")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS), help="some of: %(default)s")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    unknown = sorted(set(chosen) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"--parts: expected some of {', '.join(part.name for part in PARTS)}, got {', '.join(unknown)}")
    if not arguments.dry_run and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no GPU (built for CUDA {torch.version.cuda}); --dry-run rehearses without one",
            file=sys.stderr,
        )
        return 2
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out.resolve()
    parts: dict[str, dict[str, Any]] = {part.name: {"status": "cut", "reason": "not asked for"} for part in PARTS}
    wanted = [part for part in PARTS if part.name in chosen]
    parts |= run_parts(wanted, out, budget_s=arguments.budget_s, rehearsal=arguments.dry_run)
    report = {
        "rehearsal": arguments.dry_run, "device": _device(arguments.dry_run), "commit": _commit(), "budget_s": arguments.budget_s,
        "seconds": time.monotonic() - started, "parts": parts,
    }  # fmt: skip
    (out / "gpu.json").write_text(json.dumps(report, indent=1))
    (out / "gpu.md").write_text(page(report) + "\n")
    print(page(report))
    return int(any(parts[part.name]["status"] != "passed" for part in wanted))


def _device(rehearsal: bool) -> dict[str, Any]:
    try:
        import triton

        version: str | None = triton.__version__
    except ImportError:
        version = None
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": version}
    if rehearsal:
        return {"name": "CPU", "num_gpus": 0, "memory_bytes": 0, "compute_capability": None, **facts}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "name": gpu.name, "num_gpus": torch.cuda.device_count(), "memory_bytes": gpu.total_memory,
        "compute_capability": f"{gpu.major}.{gpu.minor}", **facts,
    }  # fmt: skip


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
