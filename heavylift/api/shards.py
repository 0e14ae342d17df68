"""Whole tensors from this rank's shard, and back, along a parameter's own sharding."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from heavylift.errors import UserError


def shard_shape(param: torch.Tensor) -> torch.Size:
    """Shape of this rank's part of `param`."""
    with torch.no_grad():  # with gradients `to_local` returns a view that autograd watches
        return param.to_local().shape if isinstance(param, DTensor) else param.shape


def gather(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The whole tensor whose shards are sharded as `param` is. A collective over the ranks of `param`.

    local: this rank's elements, any shape and device. Returns a tensor of `param`'s shape on its device, on all ranks.
    """
    local = local.view(shard_shape(param))
    if not isinstance(param, DTensor):
        return local.to(param.device)
    sharded = DTensor.from_local(
        local.to(param.to_local().device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return sharded.full_tensor()


def own_part(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, which every rank has: no communication. [shard_shape(param)], dtype of `whole`.

    Raises UserError when the shape is not the parameter's.
    """
    if whole.shape != param.shape:
        raise UserError(f"value: expected the whole parameter's shape {tuple(param.shape)}, got {tuple(whole.shape)}")
    return distribute_as(param, whole).to_local() if isinstance(param, DTensor) else whole


def distribute_as(param: DTensor, whole: torch.Tensor) -> DTensor:
    """`whole`, which every rank has, sharded as `param` is and on its device: no communication."""
    device = param.to_local().device
    return distribute_tensor(whole.to(device), param.device_mesh, param.placements, src_data_rank=None)


def whole_value(param: nn.Parameter) -> torch.Tensor:
    """The parameter's own value, whole, on all ranks: a collective where it is sharded. Detached, a copy."""
    value = param.detach()
    if not isinstance(value, DTensor):
        return value.clone()
    whole = value.full_tensor()
    # over one shard nothing is gathered, and the whole tensor is the shard itself
    return whole.clone() if whole.data_ptr() == value.to_local().data_ptr() else whole
