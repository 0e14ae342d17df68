"""The small file of a checkpoint, `extras.pt`: what goes into it must come out again without running code.

That is `torch.load(weights_only=True)`. What does not is named: the key, its type, and what to save instead.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from heavylift.config.words import shown
from heavylift.errors import UserError

_DEEPEST = 50


def check_client_state(client_state: Any) -> dict[str, Any]:
    """`client_state` as a dictionary, None as an empty one. Raises UserError for anything else."""
    if client_state is None:
        return {}
    if not isinstance(client_state, dict):
        raise UserError(f"save_checkpoint: client_state= should be a dictionary, got {shown(client_state)}")
    return client_state


def pack_extras(extras: Mapping[str, Any]) -> bytes:
    """As torch.save writes it. Raises UserError for what could not be loaded again without running code."""
    for key, value in extras.items():
        if not _loads_again(value):
            where, culprit = _find_culprit(value, key, _DEEPEST)
            raise UserError(
                f"save_checkpoint: {where} is of type {_kind(culprit)}, which cannot be loaded without running code; "
                f"save {_remedy(culprit)} instead"
            )
    buffer = io.BytesIO()
    torch.save(dict(extras), buffer)
    return buffer.getvalue()


def _loads_again(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # a class's own pickling may raise anything
        return False
    return True


def _find_culprit(value: Any, where: str, depth: int) -> tuple[str, Any]:
    """The innermost value that does not load again, and where it is: `client_state['args']`."""
    inner: list[tuple[str, Any]] = []
    if type(value) is dict:
        inner = [(f"{where}[{shown(key)}]", item) for key, item in value.items()]
        inner += [(f"the key {shown(key)} of {where}", key) for key in value]
    elif type(value) in (list, tuple):
        inner = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    for name, item in inner if depth else []:
        if not _loads_again(item):
            return _find_culprit(item, name, depth - 1)
    return where, value


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _remedy(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    if isinstance(value, Namespace):
        return "vars() of it"
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return "its state_dict()"
    if module == "numpy":
        return "its .item(), or torch.from_numpy() of an array"
    return "numbers, text, tensors, lists and dictionaries"
