"""What this process can use: GPUs and memory. Read once at start-up."""

import os

import torch

from dflash2_ray.config import MachineFacts


def read_machine_facts() -> MachineFacts:
    """GPUs that this process sees, the memory of the first one, and the machine's memory, in bytes."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu_memory = torch.cuda.get_device_properties(0).total_memory if num_gpus else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineFacts(num_gpus, gpu_memory, memory)


def limit_threads() -> None:
    """One compute thread unless the user asked for more: two busy processes that spin starve each other."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
