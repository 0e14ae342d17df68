"""Parameters and buffers of a model by name: tied ones once, and what checkpoints hold of them."""

from __future__ import annotations

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
