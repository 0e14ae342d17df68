"""Reading and setting float32 values, gradients and moments of single parameters: DeepSpeed's `utils.safe_*`.

    grad = safe_get_full_grad(p)                        the whole gradient that the coming step will use
    safe_set_full_fp32_param(p, value)                  master and parameter
    m = safe_get_local_optimizer_state(p, "exp_avg")    this rank's shard, flat

Parameters are those of `engine.module`, sharded or as a forward has left them gathered. The *full* getters are
collectives: every rank calls them, in the same order, and gets the whole tensor. The *full* setters take the whole
tensor on every rank, the same on all. *local* ones neither communicate nor care what other ranks do. Getters return
copies in float32; None where there is nothing: a frozen parameter, a gradient before backward or after the step, a
moment of another optimizer.

A step on the host that is still under way is waited for. With the schedules `immediate` and `speculative` the step is
taken during backward: between backward and `step()` getters of states then give the values after it, and setters raise
UserError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.api.gathered import find_place, shard_of
from heavylift.api.gathering import WholeParameter
from heavylift.api.owners import owner_of, states_of
from heavylift.api.shards import gather, own_part
from heavylift.api.torch_step import TorchStep
from heavylift.errors import UserError
from heavylift.offload.groups import local_tensor
from heavylift.offload.tensors import MOMENTS

MASTER = "master"
GRADIENT = "gradient"


# ---- whole tensors ---------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole float32 value behind `param`. A collective."""
    return _get_full(param, MASTER)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient of `param`, float32, before clipping. A collective."""
    return _get_full(param, GRADIENT)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The whole moment `exp_avg` or `exp_avg_sq` of `param`, float32. A collective. UserError for another key."""
    return _get_full(param, _moment(param, optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the float32 value behind `param`, and `param` to its rounding. value: `param`'s shape, on every rank."""
    _set_full(param, MASTER, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the gradient that the coming step will use. value: `param`'s shape, on every rank."""
    _set_full(param, GRADIENT, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets the moment `exp_avg` or `exp_avg_sq`. value: `param`'s shape, on every rank."""
    _set_full(param, _moment(param, optim_state_key), value)


# ---- this rank's shard -----------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the float32 value, flat, on the CPU."""
    return _get_local(param, MASTER)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient, flat float32 on the CPU."""
    return _get_local(param, GRADIENT)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of a moment, flat float32 on the CPU."""
    return _get_local(param, _moment(param, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of the float32 value, and of the parameter. value: as many elements as the getter's."""
    _set_local(param, MASTER, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient."""
    _set_local(param, GRADIENT, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a moment."""
    _set_local(param, _moment(param, optim_state_key), value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replaces the gradient of each parameter that has one by `update_func(gradient, parameter)`.

    gradient: whole, float32; what comes back has the same shape. A collective.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# ---- one place for all of them ---------------------------------------------------------------------------------------


def _moment(param: nn.Parameter, key: str) -> str:
    if states_of(_shard(param)) is not None and key not in MOMENTS:
        raise UserError(f"optim_state_key: expected one of {', '.join(MOMENTS)}, got {key!r}")
    return key


def _get_full(param: nn.Parameter, name: str) -> torch.Tensor | None:
    param = _shard(param)
    local = _get_local(param, name)
    return None if local is None else gather(param, local)


def _get_local(param: nn.Parameter, name: str) -> torch.Tensor | None:
    param = _shard(param)
    states = states_of(param)
    if states is not None:
        return states.read_grad() if name == GRADIENT else states.read(name)
    tensor = _tensor_of(param, name)
    if tensor is None:
        return None
    return local_tensor(tensor).reshape(-1).float().cpu().clone().div_(_scale_of(param, name))


def _set_full(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    param = _shard(param)
    _set_local(param, name, own_part(param, value).reshape(-1))


def _set_local(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """value: flat or not, this rank's elements."""
    param = _shard(param)
    value = value.detach().reshape(-1)
    num_expected = local_tensor(param).numel()
    if value.numel() != num_expected:
        raise UserError(f"value: expected this rank's {num_expected} elements, got {value.numel()}")
    place = find_place(param) if name == MASTER else None
    if place is not None:
        place.prepare_write("safe_set_*_fp32_param")
    _write(param, name, value)
    if place is not None:
        place.count_write()


def _write(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    states = states_of(param)
    if states is not None:
        try:
            if name == GRADIENT:
                states.write_grad(value)
            else:
                states.write(name, value)
        except (RuntimeError, ValueError) as error:
            raise UserError(str(error)) from None
        return
    tensor = _tensor_of(param, name)
    if tensor is None:
        raise UserError(f"cannot set {name}: no engine trains this parameter, or there is none yet")
    owner = owner_of(param)
    if name == MASTER and isinstance(owner, TorchStep):
        owner.write_master(param, value)
        return
    with torch.no_grad():
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        shard.view(-1).copy_(value.float() * _scale_of(param, name))


def _tensor_of(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """The tensor itself, where an optimizer of torch.optim trains the parameter."""
    owner = owner_of(param)
    if owner is None:
        return None
    master = owner.master_of(param) if isinstance(owner, TorchStep) else param
    if name == MASTER:
        if isinstance(owner, TorchStep):
            owner.follow(param)
        return master
    if name == GRADIENT:
        return owner.grad_of(param) if isinstance(owner, TorchStep) else param.grad
    state = owner.state.get(master, {}).get(name)
    return state if isinstance(state, torch.Tensor) else None


def _scale_of(param: nn.Parameter, name: str) -> float:
    """The factor that a gradient carries."""
    owner = owner_of(param)
    return owner.grad_scale if name == GRADIENT and isinstance(owner, TorchStep) else 1.0


def _shard(param: nn.Parameter) -> nn.Parameter:
    """What the optimizer knows of `param`, gathered by FSDP2 or not. Raises UserError for what is no parameter, and
    inside of `GatheredParameters`."""
    if not isinstance(param, nn.Parameter):
        raise UserError(f"utils.safe_*: expected a parameter of the engine's module, got a {type(param).__name__}")
    if isinstance(param, WholeParameter):
        raise UserError(
            "utils.safe_*: the parameter is gathered by GatheredParameters; leave that context first, or use the "
            "parameter itself"
        )
    return shard_of(param)
