"""Whole tensors of sharded ones, for tests that gather hundreds of them.

Not `DTensor.full_tensor`: in one of some ten whole runs of these tests a rank met a damaged heap in gloo's thread while
it waited for that (torch 2.13; docs/log.md). It goes through torch's functional collectives, this through c10d's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter or state, gathered. A collective."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    result = tensor.to_local()
    sharded = [(axis, p.dim) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard)]
    for axis, dim in reversed(sharded):
        group = tensor.device_mesh.get_group(axis)
        pieces: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(pieces, result, group=group)
        result = torch.cat(pieces, dim)
    assert result.shape == tensor.shape, f"{result.shape=} {tensor.shape=}"
    return result.clone()
