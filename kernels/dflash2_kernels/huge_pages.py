"""Memory for weights in pages of 2 MiB where the kernel grants them: a core that streams weights through pages of 4 KiB waits for
address translations most of the time. It must not know what is stored.
"""

import mmap
import threading

import torch

PAGE = 2 << 20
_CHUNK = 16 * PAGE  # small tensors share chunks; a chunk lives as long as any of them
_ALIGN = 64  # bytes
_lock = threading.Lock()
_open = torch.empty(0, dtype=torch.uint8)  # what is left of the newest chunk


def empty(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor [num_elements] that starts on a cache line."""
    global _open
    num_bytes = num_elements * dtype.itemsize
    room = -(-num_bytes // _ALIGN) * _ALIGN
    with _lock:
        if _open.shape[0] < room:
            _open = _chunk(max(_CHUNK, room))
        own, _open = _open[:num_bytes], _open[room:]
    return own.view(dtype)


def _chunk(num_bytes: int) -> torch.Tensor:
    """[≥ num_bytes] bytes from a border of a huge page on."""
    size = -(-num_bytes // PAGE) * PAGE
    block = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + size]
