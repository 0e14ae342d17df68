"""Writes a `state_dict` into a sharded module: what trains it follows, and nothing is written where something is wrong.

Values may be whole tensors, the same on every rank, or DTensors: those that are sharded as the module is are taken as
they lie, others are gathered. One tensor at a time, so that no rank holds more than it was given. Left out: files
(`heavylift.api.engine_checkpoint`), and replacing the module's own tensors (`assign`).

A script may also call `load_state_dict` of the module itself, or of a part of it: see `accept_whole_tensors`. Masters
then start from the values as the parameters' dtype has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from heavylift.api.owners import write_weight
from heavylift.api.shards import distribute_as, own_part
from heavylift.config.words import shown
from heavylift.errors import UserError


def load_module(
    call: str, module: nn.Module, state_dict: Mapping[str, Any], strict: bool, scalars: frozenset[str]
) -> _IncompatibleKeys:
    """Loads `state_dict` into parameters (with the masters behind them) and buffers; see `write_weight`.

    call: for messages. scalars: names of parameters that had no dimension before they were sharded. Returns the names
    that were missing and unexpected, as `nn.Module.load_state_dict` does. A collective where DTensors are sharded
    otherwise. Raises UserError, and writes nothing, for other shapes, what is no tensor, and, with `strict`, for names
    that are missing or unknown.
    """
    if not isinstance(state_dict, Mapping):
        raise UserError(f"{call}: expected a state_dict (names and tensors), got {shown(state_dict)}")
    own = module.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state_dict]
    unknown = [name for name in state_dict if name not in own]
    if strict and (missing or unknown):
        raise UserError(f"{call}: missing {missing[:3]}, unknown {unknown[:3]}; or strict=False")
    found = {name: _as_own(name, state_dict[name], scalars) for name in own if name in state_dict}
    problems = [problem for name, value in found.items() if (problem := _problem(call, name, own[name], value))]
    if problems:
        raise UserError(*problems)
    for name, value in found.items():
        _write(module, name, own[name], value)
    return _IncompatibleKeys(missing, unknown)


def accept_whole_tensors(module: nn.Module) -> None:
    """Makes `module.load_state_dict` take whole tensors, the same on every rank, for the sharded parameters that lie in
    `module` itself: each rank copies its part. Raises UserError for `assign=True`, which would replace the shards."""
    shards = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}

    def distribute(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        for name, param in shards.items():
            value = state_dict.get(prefix + name)
            if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor):
                continue  # whole, inside of `GatheredParameters`; or missing
            if metadata.get("assign_to_params_buffers"):
                raise UserError("load_state_dict: assign=True would replace the sharded parameters; leave it out")
            if not isinstance(value, DTensor):
                value = value.reshape(param.shape) if value.ndim == 0 and param.numel() == 1 else value
                if value.shape == param.shape:
                    value = distribute_as(param, value)
                state_dict[prefix + name] = value  # in the copy that `load_state_dict` has made

    if shards:
        module.register_load_state_dict_pre_hook(distribute)


def _as_own(name: str, value: Any, scalars: frozenset[str]) -> Any:
    without_dimension = name in scalars and isinstance(value, torch.Tensor) and value.ndim == 0
    return value.reshape(1) if without_dimension else value


def _problem(call: str, name: str, own: Any, value: Any) -> str | None:
    if not isinstance(own, torch.Tensor):
        return None
    if not isinstance(value, torch.Tensor):
        return f"{call}: {name} should be a tensor, got {shown(value)}"
    if value.shape != own.shape:
        return f"{call}: {name} has shape {tuple(value.shape)} there, {tuple(own.shape)} in this model"
    return None


@torch.no_grad()
def _write(module: nn.Module, name: str, own: Any, value: Any) -> None:
    if not isinstance(own, torch.Tensor):
        path = name.removesuffix(_EXTRA_STATE_KEY_SUFFIX).rstrip(".")
        module.get_submodule(path).set_extra_state(value)
        return
    value = value.detach()
    if isinstance(value, DTensor) and _is_sharded_as(own, value):
        part = value.to_local()
    else:
        part = own_part(own, value.full_tensor() if isinstance(value, DTensor) else value)
    if isinstance(own, nn.Parameter):
        write_weight(own, part)
    else:
        own.copy_(part)


def _is_sharded_as(own: torch.Tensor, value: DTensor) -> bool:
    if not isinstance(own, DTensor):
        return False
    return value.device_mesh == own.device_mesh and value.placements == own.placements
