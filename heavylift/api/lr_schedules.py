"""The five learning-rate schedulers that a ds_config.json names, step for step as DeepSpeed has them.

A config that moves over keeps its curve, oddities included. In what follows `t` is `last_batch_iteration`: -1 when a
scheduler is made, 0 after the first `step()`, which is called once after every optimizer step that was not skipped.
So optimizer step `k` (from 1) uses the rate at `t = k - 2`, and the warm-up schedulers start late: steps 1 and 2 both
use the minimum.

Left out: the command-line arguments for these schedulers (`heavylift.api.lr_arguments`) and the schedules of
`heavylift train` (`heavylift.train.schedules`).
"""

from __future__ import annotations

import inspect
import logging
import math

import torch.distributed as dist

from heavylift.api.lr_base import HasParamGroups, Scheduler, Values
from heavylift.api.lr_one_cycle import OneCycle
from heavylift.api.lr_params import Kind, param_problems
from heavylift.config.deepspeed.settings import SchedulerSettings
from heavylift.config.words import named, nearest, shown
from heavylift.errors import UserError

logger = logging.getLogger(__name__)


def _warmup_share(iteration: int, num_steps: int, warmup_type: str) -> float:
    """Share of the way from minimum to maximum at `iteration` below `num_steps`, in [0, 1].

    log: log(t + 1) / log(W); linear: t / W.
    """
    # the factor first, as the original multiplies: the last bit depends on it
    return (1.0 / math.log(num_steps)) * math.log(iteration + 1) if warmup_type == "log" else iteration / num_steps


def _warn_if_shorter(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "scheduler: total_num_steps %d is less than warmup_num_steps %d: the run ends during warm-up",
            total_num_steps,
            warmup_num_steps,
        )


class WarmupLR(Scheduler):
    """Warm-up from `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's own), then constant.

    lr(t) = min + (max - min) * g(t); with W = max(2, warmup_num_steps): g = log(t + 1) / log(W) or t / W while t < W,
    then 1. The first step uses min.
    """

    KINDS = {
        "warmup_min_lr": Kind.LR,
        "warmup_max_lr": Kind.LR_OR_NONE,
        "warmup_num_steps": Kind.STEPS_OR_ZERO,
        "warmup_type": Kind.WARMUP_TYPE,
    }

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        params = {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, last_batch_iteration, params)
        own_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr)
        self.max_lrs = own_lrs if warmup_max_lr is None else self._per_group(warmup_max_lr)
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.warmup_type = warmup_type
        self._start()

    def _initial_lrs(self) -> list[float]:
        return list(self.min_lrs)

    def _after_warmup(self) -> float:
        return 1.0

    def _lrs(self) -> list[float]:
        if self.last_batch_iteration < self.warmup_num_steps:
            share = _warmup_share(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        else:
            share = self._after_warmup()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Warm-up as `WarmupLR`, then linearly down to `warmup_min_lr` at `total_num_steps`.

    After warm-up g(t) = max(0, (T - t) / max(1, T - W)) with T = total_num_steps.
    """

    KINDS = {"total_num_steps": Kind.STEPS, **WarmupLR.KINDS}

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        problems = param_problems({"total_num_steps": Kind.STEPS}, {"total_num_steps": total_num_steps}, 1)
        if problems:
            raise UserError(*(f"{type(self).__name__}.{problem}" for problem in problems))
        self.total_num_steps = int(total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_shorter(self.total_num_steps, self.warmup_num_steps)

    def _after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(Scheduler):
    """Shares of the optimizer's own rates: warm-up from `warmup_min_ratio` to 1, then a cosine to `cos_min_ratio`.

    While t < W: ratio = warmup_min_ratio + (1 - warmup_min_ratio) * g(t), g as in `WarmupLR`. Then with
    x = min(1, (t - W + 1) / max(1, T - W)): ratio = c + (1 - c) * (1 + cos(pi x)) / 2, c = cos_min_ratio.
    The very first optimizer step has rate 0, whatever `warmup_min_ratio` is.
    """

    KINDS = {
        "total_num_steps": Kind.STEPS,
        "warmup_min_ratio": Kind.NONNEGATIVE,
        "warmup_num_steps": Kind.STEPS_OR_ZERO,
        "cos_min_ratio": Kind.NONNEGATIVE,
        "warmup_type": Kind.WARMUP_TYPE,
    }

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        params = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, last_batch_iteration, params)
        self.total_num_steps = int(total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = warmup_type
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_if_shorter(self.total_num_steps, self.warmup_num_steps)
        self._start()

    def get_lr_ratio(self) -> float:
        """Share of the optimizer's own rates at `last_batch_iteration`."""
        iteration, warmup = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < warmup:
            share = _warmup_share(iteration, warmup, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def _initial_lrs(self) -> list[float]:
        return [0.0] * len(self.org_lrs)

    def _lrs(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class LRRangeTest(Scheduler):
    """Rates that only rise, to see from where on training diverges (https://arxiv.org/abs/1803.09820).

    lr(t) = min * (1 + rate * i), i = (t + 1) / size, rounded down with `lr_range_test_staircase`. Step 1
    uses min.
    """

    KINDS = {
        "lr_range_test_min_lr": Kind.LR,
        "lr_range_test_step_size": Kind.STEPS,
        "lr_range_test_step_rate": Kind.NUMBER,
        "lr_range_test_staircase": Kind.BOOL,
    }

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: Values = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        params = {
            "lr_range_test_min_lr": lr_range_test_min_lr,
            "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate,
            "lr_range_test_staircase": lr_range_test_staircase,
        }
        super().__init__(optimizer, last_batch_iteration, params)
        self.min_lr = self._per_group(lr_range_test_min_lr)
        self.step_size = int(lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start()

    def _initial_lrs(self) -> list[float]:
        return list(self.min_lr)

    def _lrs(self) -> list[float]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Sets the rates for the next optimizer step: of the next iteration, or of the one given."""
        self._step_to(batch_iteration)


SCHEDULERS: dict[str, type[Scheduler]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULERS)


def make_scheduler(settings: SchedulerSettings, optimizer: HasParamGroups) -> Scheduler:
    """The scheduler that the `scheduler` block of a ds_config.json asks for.

    Raises UserError, one line per problem: an unknown type, unknown, missing and wrong parameters.
    """
    kind = SCHEDULERS.get(settings.name)
    if kind is None:
        guess = nearest(settings.name, SCHEDULERS)
        hint = f"did you mean {guess}?" if guess else "choose one of these"
        raise UserError(f"scheduler.type: expected one of {', '.join(SCHEDULERS)}, got {named(settings.name)}; {hint}")
    problems = []
    known = {**kind.KINDS, "last_batch_iteration": None}
    for key in settings.params:
        if key not in known:
            guess = nearest(str(key), known)
            hint = f"did you mean {guess}?" if guess else f"it takes {', '.join(kind.KINDS)}"
            problems.append(f"scheduler.params.{named(str(key))}: not a parameter of {kind.__name__}; {hint}")
    for key, argument in inspect.signature(kind).parameters.items():
        if argument.default is argument.empty and key != "optimizer" and key not in settings.params:
            problems.append(f"scheduler.params.{key}: missing; {kind.__name__} needs {kind.KINDS[key].value}")
    checked = {key: value for key, value in settings.params.items() if key in kind.KINDS}
    problems += [f"scheduler.params.{one}" for one in param_problems(kind.KINDS, checked, len(optimizer.param_groups))]
    iteration = settings.params.get("last_batch_iteration", -1)
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < -1:
        problems.append(
            f"scheduler.params.last_batch_iteration: expected a whole number from -1, got {shown(iteration)}"
        )
    if problems:
        raise UserError(*problems)
    return kind(optimizer, **settings.params)
