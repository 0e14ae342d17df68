"""`deepspeed.utils.groups`: who trains with whom. All ranks are data parallel; other groups are this rank alone."""

from __future__ import annotations

import torch.distributed as dist

_alone: list[dist.ProcessGroup] = []


def get_data_parallel_group() -> dist.ProcessGroup:
    """All ranks."""
    assert dist.group.WORLD is not None, "init_distributed() comes first"
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def get_local_group() -> dist.ProcessGroup:
    """A group of this rank only: model, sequence and expert parallelism. A collective at the first call."""
    if not _alone:
        mine = dist.get_rank()
        made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _alone.append(made[mine])
    return _alone[0]


def get_one() -> int:
    """The size of a group of this rank only."""
    return 1


def get_zero() -> int:
    """The rank in a group of this rank only."""
    return 0
