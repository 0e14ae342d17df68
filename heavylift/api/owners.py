"""Which optimizer trains a parameter: what `utils.safe_get_*` and `GatheredParameters` need to know, who only get one.

`initialize()` registers the optimizers that it makes. They are held weakly: an engine that goes away takes its
parameters' entry along.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from heavylift.api.torch_step import TorchStep
from heavylift.offload.access import ParamStates, find_states
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


def _trains(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> bool:
    if isinstance(optimizer, TieredAdamW):
        return param in optimizer._param_group_of
    if isinstance(optimizer, TorchStep):
        return optimizer.trains(param)
    return any(param is p for group in optimizer.param_groups for p in group["params"])
