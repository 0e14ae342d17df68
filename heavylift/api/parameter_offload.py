"""`engine.optimizer.parameter_offload` of stage 3: where libraries look for DeepSpeed's hooks on modules.

TRL, and who has its helper from there, takes those hooks off while it generates under `GatheredParameters`, and puts
them back. Here there are none to take off: a forward gathers as it always does. So this has what that code goes
through, all of it empty. Left out: DeepSpeed's parameter coordinator.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class _NoParameters(nn.Module):
    """A module without parameters, also of other modules'."""

    def ds_external_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """None."""
        return ()


class ParameterOffload:
    """No hooks, on a module without parameters."""

    def __init__(self) -> None:
        self.module: nn.Module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """No effect."""
