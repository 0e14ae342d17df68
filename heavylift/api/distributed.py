"""The process group: under a launcher, torchrun, MPI, srun, or as a single process."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.gloo_threads import wait_at_exit
from heavylift.launch.options import DEFAULT_PORT
from heavylift.launch.surroundings import foreign_rank
from heavylift.ranks import COLLECTIVE_TIMEOUT, Ranks

logger = logging.getLogger(__name__)

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_cpu_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group, and the one made beside it."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Starts torch.distributed unless it runs already: gloo on CPUs; on GPUs NCCL with gloo beside it.

    Ranks come from `rank` and `world_size`, from the variables of torchrun or our launcher, or (with
    `auto_mpi_discovery`) from those of mpirun or srun; a process without any is a world of one. `dist_init_required`
    false: a running process group is expected, else UserError. `config` is accepted for compatibility and has no
    effect.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UserError("init_distributed: dist_init_required is false, but torch.distributed is not initialised")
    _check_arguments(dist_backend, timeout, rank, world_size)
    if rank >= 0 and world_size > 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if auto_mpi_discovery:
        discover_ranks(distributed_port)
    alone = "WORLD_SIZE" not in os.environ and init_method is None
    if not alone:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        _check_env(init_method)
    ranks = Ranks.here()
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo")
    if backend == "nccl" and ranks.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # objects and offloaded states are exchanged on the CPU
    more: dict[str, Any] = {"timeout": timeout}
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        more["device_id"] = ranks.device
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
    elif init_method is not None:
        dist.init_process_group(backend, init_method, rank=ranks.rank, world_size=ranks.world_size, **more)
    else:
        dist.init_process_group(backend, **more)
    wait_at_exit()
    if verbose and ranks.rank == 0:
        logger.info("torch.distributed: %d ranks, %s", ranks.world_size, backend)


def _check_arguments(dist_backend: Any, timeout: Any, rank: int, world_size: int) -> None:
    known = dist.Backend.backend_list
    parts = [] if dist_backend is None else [part.rpartition(":")[2] for part in str(dist_backend).lower().split(",")]
    if not all(part in known for part in parts):
        raise UserError(
            f"init_distributed: dist_backend= should be nccl or gloo, or leave it out, got {shown(dist_backend)}"
        )
    if not isinstance(timeout, timedelta):
        raise UserError(f"init_distributed: timeout= should be a datetime.timedelta, got {shown(timeout)}")
    if world_size > 0 and rank >= world_size:
        raise UserError(f"init_distributed: rank= should be below world_size={world_size}, got {rank}")


def discover_ranks(distributed_port: int = DEFAULT_PORT) -> None:
    """Sets torchrun's variables from those of mpirun or srun where only those are there. Raises UserError for several
    machines of an mpirun without MASTER_ADDR.
    """
    if "WORLD_SIZE" in os.environ:
        return
    found = foreign_rank(os.environ)
    if found is None or found.variables["WORLD_SIZE"] == "1":
        return
    if distributed_port != DEFAULT_PORT:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    for name, value in found.variables.items():
        os.environ.setdefault(name, value)


def _check_env(init_method: str | None) -> None:
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing and init_method is None:
        raise UserError(
            f"environment: WORLD_SIZE is set, but {', '.join(missing)} is not; start the script with "
            "`heavylift launch` or torchrun, or unset WORLD_SIZE for a single process"
        )


def broadcast_from_first(tensor: torch.Tensor, device: torch.device) -> None:
    """Overwrites `tensor`, on whatever device, with rank 0's values. A collective."""
    if dist.get_world_size() == 1:
        return
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and not _reaches("cpu"):
        staged = tensor.to(device)
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)
    elif tensor.is_contiguous():
        dist.broadcast(tensor, src=0)
    else:
        whole = tensor.contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def cpu_group() -> dist.ProcessGroup:
    """All ranks, by gloo: the default group where it is gloo's, else a group made for it once. A collective."""
    global _cpu_group
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is not initialised"
    if dist.get_backend() == "gloo":
        return default
    if _cpu_group is None or _cpu_group[0] is not default:
        _cpu_group = (default, dist.new_group(backend="gloo"))
    return _cpu_group[1]


def flags_device(device: torch.device) -> torch.device:
    """Where small tensors are exchanged: the CPU where the process group reaches it, else the accelerator."""
    return torch.device("cpu") if _reaches("cpu") else device


def exchange_device(device: torch.device) -> torch.device:
    """Where tensors of `device` are exchanged: there, or on this rank's GPU where the process group reaches no CPU."""
    return Ranks.here().device if device.type == "cpu" and not _reaches("cpu") else device


def _reaches(device_type: str) -> bool:
    return device_type in dist.get_backend_config()
