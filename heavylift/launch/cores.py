"""The number of processes on this machine, and each one's cores and threads.

Who gets which cores is decided in `placement.py` and read from the machine in `binding.py`; this is what training asks.
"""

from __future__ import annotations

import os
from pathlib import Path

from heavylift.config.schema import Recipe
from heavylift.config.words import counted
from heavylift.errors import UserError
from heavylift.launch.binding import place_of_rank
from heavylift.launch.placement import parse_places
from heavylift.launch.quota import PLACES_VARIABLE, cpu_quota, num_usable_cores

__all__ = [
    "cpu_quota",
    "default_nproc",
    "gpu_count",
    "num_usable_cores",
    "requested_nproc",
    "split_cores",
    "threads_per_rank",
]

# the kernel's files are there on machines with an accelerator; without them there is no need to import torch
_ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")


def split_cores(local_rank: int, local_world_size: int) -> list[int]:
    """This rank's share of the allowed CPUs, beside its GPU, disjoint from the others' while there are enough.

    One hardware thread of every core comes first, then the cores' other threads. With a quota the share is
    shortened, so that all ranks' threads together do not exceed it. At least one CPU.
    """
    return list(place_of_rank(local_rank, local_world_size).cpus)


def threads_per_rank(local_world_size: int) -> int:
    """Threads that each rank should run, at least 1: as the launcher divided, else usable cores over ranks."""
    if (table := os.environ.get(PLACES_VARIABLE)) is not None:
        places = parse_places(table)
        if len(places) == local_world_size:
            return min(place.num_threads for place in places)
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
            raise UserError(
                f"launch.nproc: {asked} processes, but {counted(gpus, 'visible GPU')}; use at most one per GPU"
            )
        return asked
    return gpus or min(2, num_usable_cores())
