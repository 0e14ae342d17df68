"""Parameters without a dimension (a temperature, a learnt scale), which FSDP2 cannot shard.

They become tensors of one element, which broadcast to the same values; in weights written for others they have no
dimension again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from heavylift.api.partition import find_partition, forget, open_whole


@torch.no_grad()
def widen_scalars(model: nn.Module) -> frozenset[str]:
    """Replaces them in place; returns their names, all of a tied one's. A collective under `zero.Init`."""
    widened: dict[nn.Parameter, nn.Parameter] = {}
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None or not _is_scalar(param):
                continue
            if param not in widened:
                open_whole([param])
                widened[param] = nn.Parameter(param.detach().reshape(1).clone(), requires_grad=param.requires_grad)
                forget([param])
            names.add(f"{prefix}.{name}" if prefix else name)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param in widened:
                module._parameters[name] = widened[param]
    return frozenset(names)


def narrowed(tensors: Mapping[str, torch.Tensor], scalars: frozenset[str]) -> dict[str, torch.Tensor]:
    """The same names; whole tensors of what had no dimension have none again."""
    return {name: t.reshape(()) if name in scalars and t.numel() == 1 else t for name, t in tensors.items()}


def _is_scalar(param: nn.Parameter) -> bool:
    partition = find_partition(param)
    return (param.ndim if partition is None else len(partition.shape)) == 0
