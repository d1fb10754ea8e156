"""Numbers of the host onto a device, in one copy that the host does not wait for. It must not know what they mean."""

import torch


def upload(numbers: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """numbers: a tensor of the host."""
    return ready_to_leave(numbers, device).to(device, non_blocking=True)


def ready_to_leave(numbers: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """numbers where a copy to the device can begin at once: for a GPU in pinned memory, which its allocator gives to nobody else
    before a copy from it is done."""
    return numbers.pin_memory() if torch.device(device).type == "cuda" else numbers
