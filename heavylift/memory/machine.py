"""What memory this machine lets us use, before anything is allocated.

Left out: measuring speeds (bus, CPU step, disk).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class MachineMemory:
    """Bytes that can still be taken."""

    host_available_bytes: int
    """On this machine, for all processes together."""
    device_available_bytes: int | None
    """On this process's device; None without one."""


def measure(device: torch.device, root: Path = Path("/")) -> MachineMemory:
    """Reads the free memory of the host (its control group where that is narrower) and of `device`."""
    device_free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return MachineMemory(host_available_bytes(root), device_free)


def agree(machine: MachineMemory, device: torch.device) -> MachineMemory:
    """The least that any process found, so that all decide alike. A collective."""
    known = machine.device_available_bytes
    least = torch.tensor([machine.host_available_bytes, -1 if known is None else known], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    host, on_device = (int(value) for value in least)
    return MachineMemory(host, None if known is None else on_device)


def host_available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can still be taken.

    A control group's limit is believed before the kernel's total: a virtual machine may start small and grow up to it,
    and a container may be allowed less than the machine has. `root` is where /proc and /sys are found.
    """
    limit = _cgroup_available(root)
    return psutil.virtual_memory().available if limit is None else limit


def _cgroup_available(root: Path) -> int | None:
    """Limit minus use of the tightest memory control group (version 2, then 1); page cache counts as free."""
    found: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / group.lstrip("/")
        for step in (folder, *folder.parents):
            if step.is_relative_to(base) and (available := _read_group(step, *names)) is not None:
                found.append(available)
    return min(found, default=None)


def _read_group(folder: Path, limit_name: str, used_name: str, cache_key: str) -> int | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" is no limit: ValueError
        used = int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit >= 2**60:  # version 1's way of saying "no limit"
        return None
    return max(0, limit - used + int(stat.get(cache_key, 0)))
