"""C for CPUs where torch has no fast operator: the `.c` files beside this module, compiled once where they run.

The compiler is `cc` (Triton needs one too, for its launchers); the library stays in the user's cache under a name that its source and
command decide. Without a compiler or the instructions there is none, and callers use torch. It must not know what is computed.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=gnu11", "-O3", "-shared", "-fPIC", "-fno-math-errno",
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma",
)  # fmt: skip
_COMPILE_S = 60


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where the CPU has no AVX512-bf16 or nothing can be compiled. CPUs with AMX have none either:
    torch's own bf16 products use it."""
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.info("no C compiler: bf16 weights are multiplied by torch")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        logger.info("C for this CPU cannot be compiled (%s): bf16 weights are multiplied by torch", error)
        return None


def _compiled(compiler: str) -> Path:
    """The shared library, compiled if the cache has none. Raises OSError or SubprocessError."""
    sources = sorted(_SOURCES.glob("*.c"))
    digest = hashlib.sha256(" ".join([compiler, *_FLAGS]).encode())
    for source in [*sources, *sorted(_SOURCES.glob("*.h"))]:
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash2_ray"
    done = folder / f"native-{digest.hexdigest()[:16]}.so"
    if not done.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / done.name
            command = [compiler, *_FLAGS, "-o", str(made), *map(str, sources)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            made.replace(done)  # several processes may do this at once
    return done
