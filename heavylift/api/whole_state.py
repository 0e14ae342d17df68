"""A `state_dict` of plain, whole tensors, as scripts pass it to `torch.save`: copies, or on rank 0 alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.api.scalars import narrowed


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with every tensor copied to `device`; sharded ones are gathered, so it is a collective for them.

    Mappings, lists and tuples are copied, anything else is taken as it is. Tied tensors are copied once.
    """
    return _clone(item, torch.device(device), {})


def whole_weights(
    module: nn.Module, scalars: frozenset[str], exclude_frozen_parameters: bool = False
) -> dict[str, Any]:
    """The state_dict of a sharded module, whole, in its own dtypes, on the CPU of rank 0; empty on the others.

    scalars: names of parameters that had no dimension. A collective, but where every rank holds all. Tensor by tensor:
    no other rank holds more than one of them whole.
    """
    is_first = dist.get_rank() == 0
    frozen = {id(p) for p in module.parameters() if not p.requires_grad}
    result: dict[str, Any] = {}
    seen: dict[int, torch.Tensor] = {}
    state_dict = module.state_dict()  # first: it shards what is gathered
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in state_dict.items():
        source = params.get(name, tensor)
        if exclude_frozen_parameters and id(source) in frozen:
            continue
        if not isinstance(source, torch.Tensor):  # extra state
            result[name] = source
            continue
        if id(source) not in seen:
            whole = source.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            # ranks other than 0 keep nothing but the fact
            seen[id(source)] = whole.cpu() if is_first else whole.new_empty(0)
        result[name] = seen[id(source)]
    return narrowed(result, scalars) if is_first else {}


def _clone(item: Any, device: torch.device, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        if id(item) not in seen:
            whole = item.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            seen[id(item)] = whole.to(device, copy=True)
        return seen[id(item)]
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, seen)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(_clone(value, device, seen) for value in item)
    return item
