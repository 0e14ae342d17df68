"""An optimizer's states by parameter name: what a checkpoint holds of them, and how they come back.

`master.NAME` of every trained parameter (float32), and the moments of those that have taken a step. Loading goes state
by state, so that one state of this rank's shards is in memory twice at a time, and not all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from heavylift.api import checkpoint
from heavylift.api.torch_step import TorchStep
from heavylift.offload.access import find_states
from heavylift.offload.groups import local_tensor
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.state_dict import as_param
from heavylift.offload.states import STATE_NAMES

Shapes = Mapping[str, TensorStorageMetadata]
_TORCH_STATE = "torch_state"


def saved_states(optimizer: TieredAdamW | TorchStep, trained: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Flat keys -> tensors; those of the host tier are views: write them before the next step."""
    if isinstance(optimizer, TorchStep):
        return _saved_torch_states(optimizer, trained)
    name_of = {param: name for name, param in trained.items()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: dict[str, Any] = {}
    for index, entry in optimizer.state_dict()["state"].items():
        tensors |= {f"{key}.{name_of[params[index]]}": entry[key] for key in STATE_NAMES}
    for name, param in trained.items():
        if f"master.{name}" not in tensors:
            tensors[f"master.{name}"] = as_param(_states(optimizer, param).read("master"), param)
    return tensors


def steps_taken(optimizer: TieredAdamW | TorchStep, trained: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Optimizer steps of every parameter: it takes none when it has no gradient."""
    if isinstance(optimizer, TorchStep):
        return {}  # part of the optimizer's own state
    return {name: _states(optimizer, param).segment.num_steps for name, param in trained.items()}


def restore_masters(
    path: Path, shapes: Shapes, optimizer: TieredAdamW | TorchStep, trained: Mapping[str, nn.Parameter]
) -> None:
    """Sets masters, and with them the parameters, to the saved values: a parameter that was not trained when it was
    saved (frozen, or without an optimizer) has no master there, and its weight becomes the master."""
    masters = _read(path, shapes, "master", trained)
    masters |= _read(path, shapes, "model", {name: p for name, p in trained.items() if name not in masters})
    for name, values in masters.items():
        if isinstance(optimizer, TorchStep):
            optimizer.write_master(trained[name], values)
        else:
            _states(optimizer, trained[name]).write("master", values)


def load_states(
    path: Path,
    shapes: Shapes,
    optimizer: TieredAdamW | TorchStep,
    trained: Mapping[str, nn.Parameter],
    steps: Mapping[str, int],
) -> None:
    """Sets moments and step counts to the saved ones; parameters that had taken no step get none."""
    if isinstance(optimizer, TorchStep):
        _load_torch_states(path, shapes, optimizer, trained)
        return
    for name, param in trained.items():
        _states(optimizer, param).segment.num_steps = int(steps.get(name, 0))
    for key in STATE_NAMES:
        if key == "master":
            continue
        found = _read(path, shapes, key, trained)
        for name, param in trained.items():
            states = _states(optimizer, param)
            states.write(key, found.get(name, torch.zeros(states.segment.numel)))


def _states(optimizer: TieredAdamW, param: nn.Parameter) -> Any:
    states = find_states(optimizer, param)
    assert states is not None, "every trained parameter is the optimizer's"
    return states


def _read(path: Path, shapes: Shapes, key: str, trained: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """This rank's part of one state of all parameters that have it: name -> flat float32 on the CPU."""
    flat = {
        name: torch.zeros(local_tensor(param).numel(), dtype=torch.float32)
        for name, param in trained.items()
        if f"{key}.{name}" in shapes
    }
    checkpoint.read_tensors(path, {f"{key}.{name}": as_param(values, trained[name]) for name, values in flat.items()})
    return flat


# ---- optimizers of torch.optim ------------------------------------------------------------------------------------


def _saved_torch_states(optimizer: TorchStep, trained: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    optimizer.follow_parameters()
    tensors: dict[str, Any] = {f"master.{n}": optimizer.master_of(p).detach() for n, p in trained.items()}
    for name, param in trained.items():
        for key, value in optimizer.state.get(optimizer.master_of(param), {}).items():
            if value is None:
                continue
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            tensors[f"{_TORCH_STATE}.{key}.{name}"] = tensor
    return tensors


def _load_torch_states(path: Path, shapes: Shapes, optimizer: TorchStep, trained: Mapping[str, nn.Parameter]) -> None:
    optimizer.state.clear()  # what had taken no step when it was saved has no state
    targets: dict[str, Any] = {}
    for key, saved in shapes.items():
        kind, _, rest = key.partition(".")
        state, _, name = rest.partition(".")
        if kind != _TORCH_STATE or name not in trained:
            continue
        master = optimizer.master_of(trained[name])
        dtype = saved.properties.dtype
        is_like_param = isinstance(master, DTensor) and tuple(saved.size) == tuple(master.shape)
        tensor = (
            torch.zeros_like(master.detach(), dtype=dtype) if is_like_param else torch.zeros(saved.size, dtype=dtype)
        )
        targets[key] = tensor
        optimizer.state[master][state] = tensor
    checkpoint.read_tensors(path, targets)
