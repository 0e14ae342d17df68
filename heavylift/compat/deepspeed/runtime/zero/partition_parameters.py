"""ZeRO: split parameters. The wrapper of tensor constructors exists to be replaced; nothing calls it."""

from collections.abc import Callable
from typing import Any

import torch

from heavylift.api.accelerator import get_accelerator
from heavylift.api.partition import ZeroParamStatus
from heavylift.api.zero import GatheredParameters, Init, register_external_parameter

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """`fn`: constructors of tensors are not changed here."""
    return fn


__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "get_accelerator", "register_external_parameter"]
