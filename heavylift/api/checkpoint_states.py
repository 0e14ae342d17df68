"""An optimizer's states by parameter name: what a checkpoint holds of them, and how they come back.

`master.NAME` of every trained parameter (float32), and the moments of those that have taken a step. A plan leaves
little memory free, so states are written one parameter after the other, and read a few (`READ_BYTES`) at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from heavylift.api import checkpoint
from heavylift.api.checkpoint_writer import Later
from heavylift.api.torch_step import TorchStep
from heavylift.offload.access import ParamStates, find_states
from heavylift.offload.groups import local_tensor
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.state_dict import as_param
from heavylift.offload.states import STATE_NAMES

Shapes = Mapping[str, TensorStorageMetadata]
_TORCH_STATE = "torch_state"
READ_BYTES = 2**29
"""Of states that are read at a time, this rank's part: each time all ranks plan together what they read."""


def saved_states(
    optimizer: TieredAdamW | TorchStep, trained: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor | Later]:
    """Flat keys -> tensors: write them before the next step. Those of a TieredAdamW are read when they are written."""
    if isinstance(optimizer, TorchStep):
        return _saved_torch_states(optimizer, trained)
    tensors: dict[str, torch.Tensor | Later] = {}
    for name, param in trained.items():
        states = _states(optimizer, param)
        like = as_param(torch.empty(states.segment.numel, dtype=torch.float32, device="meta"), param)
        for key in STATE_NAMES if states.segment.num_steps > 0 else ("master",):
            tensors[f"{key}.{name}"] = Later(like, partial(_read_as_param, states, key, param))
    return tensors


def _read_as_param(states: ParamStates, key: str, param: nn.Parameter) -> torch.Tensor:
    return as_param(states.read(key), param)


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
    without = {name: param for name, param in trained.items() if f"master.{name}" not in shapes}
    for name, values in chain(_read(path, shapes, "master", trained), _read(path, shapes, "model", without)):
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
        for name, values in _read(path, shapes, key, trained):
            _states(optimizer, trained[name]).write(key, values)
        for name, param in trained.items():
            if f"{key}.{name}" not in shapes:
                states = _states(optimizer, param)
                states.write(key, torch.zeros(states.segment.numel))


def _states(optimizer: TieredAdamW, param: nn.Parameter) -> ParamStates:
    states = find_states(optimizer, param)
    assert states is not None, "every trained parameter is the optimizer's"
    return states


def _read(
    path: Path, shapes: Shapes, key: str, trained: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of one state of the parameters that have it, flat float32 on the CPU, with their names.

    A collective while it is gone through. At most `READ_BYTES`, or one parameter's, are in memory at a time.
    """
    for names in _pieces({name: param for name, param in trained.items() if f"{key}.{name}" in shapes}):
        flat = {name: torch.zeros(local_tensor(trained[name]).numel(), dtype=torch.float32) for name in names}
        checkpoint.read_tensors(path, {f"{key}.{n}": as_param(values, trained[n]) for n, values in flat.items()})
        while flat:
            yield flat.popitem()


def _pieces(params: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Names, in order, of as many as one reading takes: the same on every rank."""
    names: list[str] = []
    num_bytes = 0
    for name, param in params.items():
        size = 4 * param.numel() // _num_shards(param)
        if names and num_bytes + size > READ_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    if names:
        yield names


def _num_shards(param: nn.Parameter) -> int:
    if not isinstance(param, DTensor):
        return 1
    return math.prod(param.device_mesh.size(a) for a, p in enumerate(param.placements) if isinstance(p, Shard))


# ---- optimizers of torch.optim ------------------------------------------------------------------------------------


def _saved_torch_states(optimizer: TorchStep, trained: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | Later]:
    optimizer.follow_parameters()
    tensors: dict[str, torch.Tensor | Later] = {
        f"master.{n}": optimizer.master_of(p).detach() for n, p in trained.items()
    }
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
