"""Gradient hooks that do not keep alive what they call.

A hook belongs to its parameter's autograd node, which Python's garbage collector cannot look into: a hook that leads
back to the parameter (through an optimizer, or only a group) is a cycle that is never found, and the optimizer, its
threads and all states stay for the life of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from heavylift.offload.groups import Group


class GradientListener(Protocol):
    """Who is told of gradients."""

    def on_grad(self, group_index: int, segment_index: int) -> None:
        """A parameter's gradient is in `param.grad`, in the stream that reduced it."""


def listen_to_gradients(groups: Sequence[Group], listener: GradientListener) -> list[RemovableHandle]:
    """Calls `listener.on_grad` after every gradient of the groups' parameters, as long as the listener lives."""
    return [
        segment.param.register_post_accumulate_grad_hook(_Hook(weakref.ref(listener), group_index, segment_index))
        for group_index, group in enumerate(groups)
        for segment_index, segment in enumerate(group.segments)
    ]


class _Hook:
    """Holds numbers and a weak reference, nothing that leads to a parameter."""

    def __init__(self, listener: weakref.ref[GradientListener], group_index: int, segment_index: int) -> None:
        self._listener = listener
        self._where = group_index, segment_index

    def __call__(self, param: torch.Tensor) -> None:
        listener = self._listener()
        if listener is not None:
            listener.on_grad(*self._where)
