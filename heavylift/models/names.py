"""Parameters and buffers of a model by name: tied ones once, and what checkpoints hold of them."""

from __future__ import annotations

import re

import torch
from torch import nn


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their first name: tied ones appear once."""
    return dict(model.named_parameters())


def tied_aliases(model: nn.Module) -> dict[str, str]:
    """Second names of tied parameters -> the name under which they are stored. By identity, not by a config flag."""
    first: dict[nn.Parameter, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in first:
            aliases[name] = first[param]
        else:
            first[param] = name
    return aliases


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that checkpoints hold."""
    state = set(model.state_dict().keys())
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def kept_in_float32(model: nn.Module) -> set[str]:
    """Buffers and frozen parameters that a transformers family wants in float32 whatever the model's dtype.

    Such as the biases by which DeepSeek V3 and ERNIE 4.5 choose experts: rounded, others are chosen.
    """
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None)
    if not patterns:
        return set()
    wanted = re.compile("|".join(rf"(^|\.){pattern}($|\.)" for pattern in patterns))
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    floating = {name for name, tensor in persistent_buffers(model).items() if tensor.is_floating_point()}
    return {name for name in frozen | floating if wanted.search(name)}
