"""Memory in use right now, in one line: of the device, as its allocator sees it, and of this process on the host.

Left out: what a run is going to need (`heavylift.memory.plan`).
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from heavylift.units import GIB


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of this process; those of the device are 0 without CUDA."""

    device_allocated_bytes: int
    """In tensors."""
    device_peak_allocated_bytes: int
    device_reserved_bytes: int
    """Taken from the device by the allocator, tensors included."""
    device_peak_reserved_bytes: int
    host_resident_bytes: int
    """Resident memory of this process."""
    host_used_percent: float
    """Of the machine's memory, by all processes, 0 to 100."""


def memory_usage(device: torch.device) -> MemoryUsage:
    """What is in use; the peaks are since the start or the last `torch.cuda.reset_peak_memory_stats`."""
    on_device = (0, 0, 0, 0)
    if device.type == "cuda":
        on_device = (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_reserved(device),
        )
    return MemoryUsage(*on_device, psutil.Process().memory_info().rss, psutil.virtual_memory().percent)


def memory_line(device: torch.device) -> str:
    """`memory (GiB): allocated 1.00 (peak 2.00), reserved 2.50 (peak 2.50), host 3.20, machine 41% used`."""
    used = memory_usage(device)
    parts = [f"host {used.host_resident_bytes / GIB:.2f}", f"machine {used.host_used_percent:.0f}% used"]
    if device.type == "cuda":
        parts = [
            f"allocated {used.device_allocated_bytes / GIB:.2f} (peak {used.device_peak_allocated_bytes / GIB:.2f})",
            f"reserved {used.device_reserved_bytes / GIB:.2f} (peak {used.device_peak_reserved_bytes / GIB:.2f})",
            *parts,
        ]
    return "memory (GiB): " + ", ".join(parts)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints `message` and the memory in use on rank 0, then begins new peaks. Nothing unless `force`."""
    if not force or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
        return
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    print(f"{message} | {memory_line(device)}", flush=True)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
