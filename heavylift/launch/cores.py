"""Which CPU cores this process may use, and each rank's share of them.

Three limits count: the affinity mask (taskset, SLURM), the control group's CPU quota (containers), and that two
hardware threads of one core share it. Left out: memory nodes of the GPUs.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from heavylift.config.schema import Recipe
from heavylift.errors import UserError

# the kernel's files are there on machines with an accelerator; without them there is no need to import torch
_ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")


def allowed_cores() -> list[int]:
    """CPU numbers this process may run on, threads of one physical core side by side, sockets one after another."""
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (*_place(cpu), cpu))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control group (version 1 or 2) grants, None without a limit.

    `root` is where /proc and /sys are found. The tightest limit on the way up to the top group counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup" / controllers, _quota_v1
            base = base if base.is_dir() else root / "sys/fs/cgroup/cpu"
        else:
            continue
        folder = base / group.lstrip("/")
        # inside a container the path may be the host's: its own limit then stands at the mount point
        steps = [folder, *folder.parents]
        quotas += [q for step in steps if step.is_relative_to(base) and (q := read(step)) is not None]
    return min(quotas, default=None)


def num_usable_cores() -> int:
    """Cores that can really be busy at once: the allowed ones, or fewer by quota. At least one."""
    quota = cpu_quota()
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def split_cores(local_rank: int, local_world_size: int) -> list[int]:
    """This rank's contiguous share of the allowed cores, disjoint from the others' while there are enough.

    With a quota the share is shortened, so that all ranks' threads together do not exceed it. At least one core.
    """
    assert 0 <= local_rank < local_world_size, (local_rank, local_world_size)
    cores = allowed_cores()
    if local_world_size >= len(cores):
        return [cores[local_rank % len(cores)]]
    start = local_rank * len(cores) // local_world_size
    share = cores[start : (local_rank + 1) * len(cores) // local_world_size]
    return share[: threads_per_rank(local_world_size)] if num_usable_cores() < len(cores) else share


def threads_per_rank(local_world_size: int) -> int:
    """Threads that each rank should run: usable cores over ranks, at least 1."""
    return max(1, num_usable_cores() // local_world_size)


def gpu_count() -> int:
    """Visible GPUs. Imports torch only on machines that have an accelerator at all."""
    if not any(Path(file).exists() for file in _ACCELERATOR_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def requested_nproc(recipe: Recipe) -> int | None:
    """Processes that the recipe asks for, None for `auto`."""
    return None if recipe.launch.nproc == "auto" else recipe.launch.nproc


def default_nproc(recipe: Recipe) -> int:
    """Processes to start here: what the recipe says, else one per GPU, else 2 (1 on a single core).

    Raises UserError if more are asked for than there are GPUs, on a machine with GPUs.
    """
    asked, gpus = requested_nproc(recipe), gpu_count()
    if asked is not None:
        if gpus and asked > gpus:
            raise UserError(f"launch.nproc: {asked} processes, but {gpus} visible GPUs; use at most one per GPU")
        return asked
    return gpus or min(2, num_usable_cores())


def _place(cpu: int) -> tuple[int, int]:
    """Socket and physical core of a CPU; each CPU is its own core where the kernel does not say."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
