"""The optimizer's states as a `state_dict`, and back: flat parts <-> one tensor per parameter.

Sharded parameters get DTensors over the same mesh with CPU shards, so that torch.distributed.checkpoint can save them
and load them on another number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from heavylift.offload.groups import Segment, local_tensor
from heavylift.offload.states import STATE_NAMES, Part

if TYPE_CHECKING:
    from heavylift.offload.optimizer import TieredAdamW


def as_param(flat: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """A flat float32 CPU shard in the shape of `param`, not copied: a DTensor when the parameter is one."""
    local = flat.view(local_tensor(param).shape)
    if not isinstance(param, DTensor):
        return local
    if local.storage_offset() > 0:
        # the same memory as a storage of its own: of a DTensor with an offset pickle and deepcopy believe that it has
        # data itself
        local = torch.from_numpy(local.numpy())
    # not `DTensor.from_local`: it would move the shard to the device of the mesh, states of the host tier and all
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    return DTensor(local, DTensorSpec(param.device_mesh, param.placements, meta), requires_grad=False)


def _collect(segment: Segment, parts: list[Part], name: str) -> torch.Tensor:
    pieces = [part.read(name, segment) for part in parts if part.overlap(segment) is not None]
    if not pieces:
        return torch.zeros(segment.numel, dtype=torch.float32)
    return pieces[0].cpu() if len(pieces) == 1 else torch.cat([piece.cpu() for piece in pieces])


def optimizer_state_dict(optimizer: TieredAdamW) -> dict[str, Any]:
    """{"state": {index: {step, master, exp_avg, exp_avg_sq}}, "param_groups": [...]}, indexed as torch does.

    float32, however they are stored. Host states that are stored so are views, not copies: save them before the next
    step.
    """
    optimizer.synchronize()
    index_of = _param_indices(optimizer)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for segment, parts in optimizer._segments():
        if segment.num_steps == 0:
            continue  # as torch: no state before the first step
        entry = {"step": torch.tensor(float(segment.num_steps))}
        for name in STATE_NAMES:
            entry[name] = as_param(_collect(segment, parts, name), segment.param)
        state[index_of[segment.param]] = entry
    packed = []
    start = 0
    for group in optimizer.param_groups:
        stop = start + len(group["params"])
        packed.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(range(start, stop))})
        start = stop
    return {"state": state, "param_groups": packed}


def load_optimizer_state(optimizer: TieredAdamW, state_dict: dict[str, Any]) -> None:
    """Inverse of `optimizer_state_dict`. Raises ValueError when the parameters do not match."""
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != sizes:
        raise ValueError(f"the saved optimizer has parameter groups of sizes {saved_sizes}, this one {sizes}")
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
    index_of = _param_indices(optimizer)
    with torch.no_grad():
        optimizer.synchronize()
        for segment, parts in optimizer._segments():
            entry = state_dict["state"].get(index_of[segment.param])
            segment.num_steps = 0 if entry is None else int(entry["step"])
            for name in STATE_NAMES if entry is not None else ():
                saved_flat = local_tensor(entry[name]).reshape(-1)
                if saved_flat.numel() != segment.numel:
                    raise ValueError(
                        f"{segment.name}: saved {name} has {saved_flat.numel()} elements, expected {segment.numel}"
                    )
                for part in parts:
                    part.write(name, segment, saved_flat)
            if entry is None:
                # never stepped: its master is the parameter and its moments are zero
                for part in parts:
                    part.read_master(segment)
                    for name in ("exp_avg", "exp_avg_sq"):
                        part.write(name, segment, torch.zeros(segment.numel))
            else:
                segment.shard().copy_(local_tensor(entry["master"]).reshape(-1))
            segment.mark_seen()


def _param_indices(optimizer: TieredAdamW) -> dict[nn.Parameter, int]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: i for i, p in enumerate(params)}
