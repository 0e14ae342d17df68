"""Which optimizer trains a parameter, and writing one so that what the optimizer keeps of it follows.

For whoever gets parameters alone: `utils.safe_get_*`, `GatheredParameters`, loading a state_dict.

`initialize()` registers the optimizers that it makes. They are held weakly: an engine that goes away takes its
parameters' entry along.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from heavylift.api.torch_step import TorchStep
from heavylift.errors import UserError
from heavylift.offload.access import ParamStates, find_states
from heavylift.offload.groups import local_tensor
from heavylift.offload.optimizer import TieredAdamW

_optimizers: list[weakref.ref[torch.optim.Optimizer]] = []


def register_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes the parameters of `optimizer` known. Registering twice does no harm."""
    _optimizers[:] = [ref for ref in _optimizers if ref() is not None and ref() is not optimizer]
    _optimizers.append(weakref.ref(optimizer))


def owner_of(param: nn.Parameter) -> torch.optim.Optimizer | None:
    """The optimizer that trains `param`, the youngest first; None for frozen or unknown parameters."""
    for ref in reversed(_optimizers):
        optimizer = ref()
        if optimizer is not None and _trains(optimizer, param):
            return optimizer
    return None


def states_of(param: nn.Parameter) -> ParamStates | None:
    """Where `param` lies on the tiers; None when no TieredAdamW trains it."""
    optimizer = owner_of(param)
    return find_states(optimizer, param) if isinstance(optimizer, TieredAdamW) else None


@torch.no_grad()
def write_weight(param: nn.Parameter, part: torch.Tensor) -> None:
    """Sets `param`, trained or not, from this rank's part of new values (as many elements as its shard, any device).

    In the parameter's own dtype: where bits differ the float32 value behind `param` becomes the new one, elsewhere it
    keeps what that dtype does not show. In another dtype: it becomes the values, in float32, and `param` its rounding.
    Raises UserError where backward has taken the coming step already.
    """
    part = part.detach().reshape(-1)
    owner = owner_of(param)
    if isinstance(owner, TieredAdamW):
        states = find_states(owner, param)
        assert states is not None
        try:
            if part.dtype == param.dtype:
                states.write_changed(part)
            else:
                states.write("master", part.float())
        except RuntimeError as error:
            raise UserError(str(error)) from None
    elif isinstance(owner, TorchStep) and part.dtype != param.dtype:
        owner.write_master(param, part.float())
    else:
        local_tensor(param).view(-1).copy_(part)
        if isinstance(owner, TorchStep):
            owner.follow(param)


def _trains(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> bool:
    if isinstance(optimizer, TieredAdamW):
        return param in optimizer._param_group_of
    if isinstance(optimizer, TorchStep):
        return optimizer.trains(param)
    return any(param is p for group in optimizer.param_groups for p in group["params"])
