"""What the ds_config schedulers have in common: counting iterations, setting the rates, the state.

Left out: the shapes (`heavylift.api.lr_schedules`, `heavylift.api.lr_one_cycle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from heavylift.api.lr_params import Kind, param_problems
from heavylift.errors import UserError

Values = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


class HasParamGroups(Protocol):
    """What a scheduler needs of an optimizer."""

    param_groups: list[dict[str, Any]]


class Scheduler(ABC):
    """What the five have in common: counting, setting the rates, the state.

    Every class raises UserError, one line per bad parameter, when it is made.
    """

    KINDS: ClassVar[dict[str, Kind]]
    """What each parameter takes."""

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int, params: dict[str, Any]) -> None:
        """`params`: the other arguments of the class by name, checked here."""
        problems = param_problems(type(self).KINDS, params, len(optimizer.param_groups))
        if problems:
            raise UserError(*(f"{type(self).__name__}.{problem}" for problem in problems))
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    def _per_group(self, value: Values) -> list[float]:
        if isinstance(value, list | tuple):
            return list(value)
        assert isinstance(value, int | float), value
        return [value] * len(self.optimizer.param_groups)

    def _start(self) -> None:
        # a scheduler that goes on from an earlier iteration leaves the optimizer's rates, which were loaded, alone
        if self.last_batch_iteration == -1:
            self._apply(self._initial_lrs())

    @abstractmethod
    def _initial_lrs(self) -> list[float]:
        """Rates of the first optimizer step, one per parameter group."""

    @abstractmethod
    def _lrs(self) -> list[float]:
        """Rates at `last_batch_iteration` >= 0, one per parameter group."""

    def get_lr(self) -> list[float]:
        """Rates at `last_batch_iteration`, one per parameter group."""
        return self._initial_lrs() if self.last_batch_iteration < 0 else self._lrs()

    def get_last_lr(self) -> list[float]:
        """Rates that the next optimizer step will use, one per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _apply(self, lrs: list[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # optimizers captured in a graph hold on to the tensor
            else:
                group["lr"] = lr

    def _step_to(self, iteration: int | None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if iteration is None else iteration
        self._apply(self.get_lr())

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the rates for the next optimizer step: of the next iteration, or of the one given."""
        self._step_to(last_batch_iteration)

    def state_dict(self) -> dict[str, int]:
        """The iteration; everything else comes from the configuration again."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Goes on where `state_dict()` was taken; the optimizer's rates follow, whether its state is loaded or not."""
        self._step_to(sd["last_batch_iteration"])
