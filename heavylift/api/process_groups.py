"""`deepspeed.utils.groups`: who trains with whom. All ranks are data parallel; other groups are this rank alone."""

from __future__ import annotations

import torch.distributed as dist

_alone: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group, and beside it that of this rank only."""


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
    global _alone
    default = get_data_parallel_group()
    if _alone is None or _alone[0] is not default:  # the default group may have been destroyed and made again
        made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _alone = (default, made[dist.get_rank()])
    return _alone[1]


def get_one() -> int:
    """The size of a group of this rank only."""
    return 1


def get_zero() -> int:
    """The rank in a group of this rank only."""
    return 0
