"""OneCycle: one rise and fall of the learning rate, momentum the other way round, then decay."""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

from heavylift.api.lr_base import HasParamGroups, Scheduler, Values
from heavylift.api.lr_params import Kind


class OneCycle(Scheduler):
    """One rise and fall of the rate, momentum the other way round, then decay (https://arxiv.org/abs/1803.09820).

    With n = t + 1, A and B the sizes of the two halves: the scale s rises from 0 to 1 over A steps and falls back over
    B; stairs make it floor(s * count) / count. lr = min + (max - min) * s; beta1 = max_mom - (max_mom - min_mom) * s.
    From t = A + B on, with d = (t - A - B + 1) / decay_step_size: lr = min / (1 + decay_lr_rate * d) and
    beta1 = max_mom * (1 + decay_mom_rate * d), kept from 0 to 0.999, where AdamW still works; `decay_step_size` 0: min
    and max_mom stay. As in the original, the first step has the minimum of both, and beta2 becomes 0.99.
    """

    KINDS = {
        "cycle_min_lr": Kind.LR,
        "cycle_max_lr": Kind.LR,
        "decay_lr_rate": Kind.NONNEGATIVE,
        "cycle_first_step_size": Kind.STEPS,
        "cycle_second_step_size": Kind.STEPS_OR_ZERO_OR_NONE,
        "cycle_first_stair_count": Kind.STEPS_OR_ZERO,
        "cycle_second_stair_count": Kind.STEPS_OR_ZERO_OR_NONE,
        "decay_step_size": Kind.NONNEGATIVE,
        "cycle_momentum": Kind.BOOL,
        "cycle_min_mom": Kind.MOMENTUM,
        "cycle_max_mom": Kind.MOMENTUM,
        "decay_mom_rate": Kind.NUMBER,
    }
    BETA2: ClassVar[float] = 0.99
    MAX_DECAYED_MOMENTUM: ClassVar[float] = 0.999

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: Values,
        cycle_max_lr: Values,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Values = 0.8,
        cycle_max_mom: Values = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        given = locals()
        super().__init__(optimizer, last_batch_iteration, {key: given[key] for key in self.KINDS})
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_step_size + self.second_step_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.min_lrs, self.max_lrs = self._per_group(cycle_min_lr), self._per_group(cycle_max_lr)
        self.min_moms, self.max_moms = self._per_group(cycle_min_mom), self._per_group(cycle_max_mom)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not all("betas" in group for group in optimizer.param_groups):
            warnings.warn(
                f"cycle_momentum has no effect: {type(optimizer).__name__} has no betas; set it to false", stacklevel=2
            )
            self.cycle_momentum = False
        self._start()
        if last_batch_iteration == -1 and self.cycle_momentum:
            self._apply_momentums(self.min_moms)

    def _initial_lrs(self) -> list[float]:
        return list(self.min_lrs)

    def _scale(self) -> float:
        # fractions of the whole cycle, not of a half: the last bits are the original's
        iteration, rise = self.last_batch_iteration + 1, self.first_step_size / self.total_size
        x = 1.0 + iteration / self.total_size - math.floor(1 + iteration / self.total_size)
        rising = x <= rise
        num_stairs = self.first_stair_count if rising else self.second_stair_count
        if num_stairs == 0:
            return x / rise if rising else (x - 1) / (rise - 1)
        # from whole steps: `x` may lie a rounding error below a stair
        position = iteration % self.total_size
        if position <= self.first_step_size:
            stair = position * num_stairs / self.first_step_size
        else:
            stair = (self.total_size - position) * num_stairs / self.second_step_size
        return math.floor(stair) / num_stairs

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def _lrs(self) -> list[float]:
        if self.last_batch_iteration >= self.total_size:
            return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]
        scale = self._scale()
        return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """(beta1, beta2) at `last_batch_iteration`, one per parameter group; None without `cycle_momentum`."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration >= self.total_size:
            factor = self._decay(self.decay_mom_rate)
            momentums = [min(max(0.0, mom * factor), max(mom, self.MAX_DECAYED_MOMENTUM)) for mom in self.max_moms]
        elif self.last_batch_iteration < 0:
            momentums = self.min_moms
        else:
            scale = self._scale()
            momentums = [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        return [(momentum, self.BETA2) for momentum in momentums]

    def _apply_momentums(self, momentums: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
            group["betas"] = (momentum, self.BETA2)

    def _step_to(self, iteration: int | None) -> None:
        super()._step_to(iteration)
        if self.cycle_momentum:
            for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=True):
                group["betas"] = betas

    def step(self, batch_iteration: int | None = None) -> None:
        """Sets rates and momenta for the next optimizer step: of the next iteration, or of the one given."""
        self._step_to(batch_iteration)
