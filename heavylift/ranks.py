"""Where this process stands among those of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from heavylift.errors import UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for the other ranks."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @classmethod
    def here(cls) -> Ranks:
        """From the process group where there is one, else from the launcher's variables; alone without any."""
        rank, world_size = _place()
        local_rank, local_world_size = on_this_machine()
        return cls(rank, world_size, local_rank, local_world_size, _device(local_rank))


def on_this_machine() -> tuple[int, int]:
    """This process's rank among those of its machine, and how many they are; its GPU is not looked for."""
    rank, world_size = _place()
    local_world_size = min(_from_env("LOCAL_WORLD_SIZE", world_size), world_size)
    return _from_env("LOCAL_RANK", rank % local_world_size), local_world_size


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return _from_env("RANK", 0), _from_env("WORLD_SIZE", 1)


def _from_env(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment: {name} should be a number, got {text!r}") from None


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank}: {torch.cuda.device_count()} GPUs are visible; start at most one process per GPU"
        )
    return torch.device("cuda", local_rank)
