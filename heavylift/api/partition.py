"""Parameters before `initialize()`: whole, or split evenly over the ranks so that no rank holds a whole model.

A *partitioned* parameter is an empty tensor (shape [0]) whose elements lie flat and padded in a shard on every rank.
`open_whole` makes it whole again on every rank; `close_discarding` and `close_from` end that. Scripts written for
DeepSpeed look at `ds_id`, `ds_shape`, `ds_numel` and `ds_status` of a parameter to find out whether it must be
gathered: these four are set, and nothing here reads them.

Collectives run over all ranks, in the order of the calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from heavylift.api.distributed import exchange_device


class ZeroParamStatus(IntEnum):
    """Values of `ds_status`, by DeepSpeed's names."""

    AVAILABLE = 1
    """The parameter is whole."""
    NOT_AVAILABLE = 2
    """It must be gathered first."""
    INFLIGHT = 3
    """Never seen here: gathering returns when it is done."""


@dataclass
class Partition:
    """What is known of a parameter that was made under `zero.Init`."""

    shape: torch.Size
    shard: torch.Tensor | None
    """This rank's elements, flat, padded to equal size; None while the parameter is whole for the first time."""
    is_open: bool


_partitions: WeakIdKeyDictionary = WeakIdKeyDictionary()
_ids = itertools.count()


def find_partition(param: torch.Tensor) -> Partition | None:
    """The parameter's partition; None for one that was not made under `zero.Init`, or has been handed over."""
    found = _partitions.get(param)
    assert found is None or isinstance(found, Partition)
    return found


def is_closed(param: torch.Tensor) -> bool:
    """Whether the parameter is an empty tensor now."""
    found = find_partition(param)
    return found is not None and not found.is_open


def mark(param: torch.Tensor, shape: torch.Size, status: ZeroParamStatus) -> None:
    """Sets the four attributes that scripts written for DeepSpeed look at."""
    described = {"ds_shape": shape, "ds_numel": shape.numel(), "ds_status": status}
    param.__dict__.update({"ds_id": param.__dict__.get("ds_id", next(_ids)), **described})


def mark_sharded(params: Iterable[nn.Parameter]) -> None:
    """For an engine's parameters of stage 3, which `GatheredParameters` makes whole."""
    for param in params:
        mark(param, param.shape, ZeroParamStatus.NOT_AVAILABLE)


def track(param: nn.Parameter) -> Partition:
    """Takes a whole parameter into the books, open; nothing is moved yet."""
    partition = Partition(param.shape, None, is_open=True)
    _partitions[param] = partition
    mark(param, param.shape, ZeroParamStatus.AVAILABLE)
    return partition


@torch.no_grad()
def open_whole(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Makes closed parameters whole on every rank; returns those that were closed. A collective for each."""
    opened = []
    for param in params:
        partition = find_partition(param)
        if partition is None or partition.is_open:
            continue
        assert partition.shard is not None
        shard = _reachable(partition.shard)
        padded = shard.new_empty(shard.numel() * dist.get_world_size())
        dist.all_gather(list(padded.chunk(dist.get_world_size())), shard)
        padded = padded.to(partition.shard.device)
        param.data = padded[: partition.shape.numel()].view(partition.shape)
        partition.is_open = True
        mark(param, partition.shape, ZeroParamStatus.AVAILABLE)
        opened.append(param)
    return opened


@torch.no_grad()
def close_discarding(params: Iterable[nn.Parameter]) -> None:
    """Back to the shards as they were; what was written into the whole parameters is lost."""
    for param in params:
        partition = find_partition(param)
        assert partition is not None and partition.shard is not None, "only a gathered parameter can be put back"
        _empty(param, partition)


@torch.no_grad()
def close_from(params: Iterable[nn.Parameter], source_rank: int) -> None:
    """Shards become what the parameters are on `source_rank`. A collective for each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for param in params:
        partition = find_partition(param)
        assert partition is not None and partition.is_open, f"{param.shape=} is not open"
        whole = param.detach()
        partition.shape = whole.shape
        numel_per_rank = -(-whole.numel() // world_size)
        padded = whole.new_zeros(numel_per_rank * world_size)
        padded[: whole.numel()] = whole.reshape(-1)
        sent = _reachable(padded)
        dist.broadcast(sent, src=source_rank)
        mine = sent[rank * numel_per_rank : (rank + 1) * numel_per_rank]
        partition.shard = mine.to(padded.device, copy=True)
        _empty(param, partition)


@torch.no_grad()
def cast(params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Rounds floating-point parameters, open or closed, to `dtype`."""
    for param in params:
        partition = find_partition(param)
        if partition is not None and partition.shard is not None and param.is_floating_point():
            partition.shard = partition.shard.to(dtype)
        if param.is_floating_point():
            param.data = param.data.to(dtype)


def forget(params: Iterable[nn.Parameter]) -> None:
    """Hands parameters over to whoever shards them now. Open ones are emptied: their values live elsewhere."""
    for param in params:
        if _partitions.pop(param, None) is not None:
            param.data = param.data.new_empty(0)


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the process group exchanges tensors: on the GPU, where a script has started NCCL alone."""
    return tensor.to(exchange_device(tensor.device))


def _empty(param: nn.Parameter, partition: Partition) -> None:
    assert partition.shard is not None
    param.data = partition.shard.new_empty(0)
    partition.is_open = False
    mark(param, partition.shape, ZeroParamStatus.NOT_AVAILABLE)
