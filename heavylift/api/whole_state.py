"""A `state_dict` of plain, whole tensors in memory of their own, as scripts pass it to `torch.save`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with every tensor copied to `device`; sharded ones are gathered, so it is a collective for them.

    Mappings, lists and tuples are copied, anything else is taken as it is. Tied tensors are copied once.
    """
    return _clone(item, torch.device(device), {})


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
