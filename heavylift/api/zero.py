"""`deepspeed.zero` by its names. What has no meaning on FSDP2 says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from heavylift.api.engine_state import EngineState
from heavylift.api.gathering import GatheredParameters
from heavylift.api.meta_weights import RandomWeights, set_weights_source
from heavylift.api.zero_init import Init
from heavylift.errors import UserError

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "RandomWeights",
    "TiledLinear",
    "register_external_parameter",
    "set_weights_source",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


class MiCS_Init(Init):
    """Refused: `UserError` says what to use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UserError("zero.MiCS_Init: sharding over a part of the ranks is not supported; use zero.Init")


class TiledLinear(nn.Module):
    """Refused: `UserError` says what to use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        raise UserError(
            "zero.TiledLinear is not supported; use nn.Linear: one layer's parameters are gathered at a time, and the "
            "loss of a large vocabulary is computed in chunks"
        )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No effect: the modules that are gathered together are whole layers, and what lies outside of them is gathered at
    the root, so a parameter that another module uses is whole when it is needed."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No effect, as `register_external_parameter`."""


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its engine, every parameter gathered once for all forwards inside. A collective.

    `model`: an engine or its module. For generation: without, each forward of stage 3 gathers layer by layer.
    """
    module = model.module if isinstance(model, EngineState) else model
    wrapped = [m for m in module.modules() if isinstance(m, FSDPModule)]
    reshards = [_reshards_after_forward(m) for m in wrapped]
    with torch.no_grad():
        for part in wrapped:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
    try:
        yield module
    finally:
        for part, reshard in zip(wrapped, reshards, strict=True):
            part.set_reshard_after_forward(reshard, recurse=False)
            part.reshard()


def _reshards_after_forward(module: FSDPModule) -> bool:
    """What `fully_shard` was told. FSDP2 has a setter only; its state is read as torch 2.11 and 2.13 have it."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if "_fsdp_param_groups" in vars(state) else [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
