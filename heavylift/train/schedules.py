"""Learning-rate schedules: the share of the peak that each optimizer step gets.

One pure function, `lr_multiplier`, holds the shapes; `build_scheduler` wraps it into an ordinary torch scheduler.
Steps are optimizer steps, counted once for all ranks and whatever the accumulation. Left out: cycles and restarts.

Conventions, chosen so that no step is spent at a learning rate of 0:
  warm-up   step `i` (from 0) of `w` gets (i + 1) / w: the first step 1/w of the peak, the last one the peak.
            (Hugging Face starts at 0, that is, its first step moves nothing.)
  decay     as in Hugging Face: the first step after warm-up gets the peak, and the minimum would be reached at step
            `num_steps`, one after the last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from heavylift.config.schema import TrainConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

# 0.07 * 100 is 7.000000000000001 in floating point; rounding that up would add a step
_ROUNDING_SLACK = 1e-9


def _share_of_steps(ratio: float, num_steps: int) -> int:
    return math.ceil(ratio * num_steps - _ROUNDING_SLACK)


def num_warmup_steps(num_steps: int, config: TrainConfig) -> int:
    """Steps of warm-up in a run of `num_steps`: `warmup_steps`, or `warmup_ratio` of the steps rounded up."""
    return config.warmup_steps or _share_of_steps(config.warmup_ratio, num_steps)


def _decay_start(num_steps: int, num_warmup: int, config: TrainConfig) -> int:
    if config.lr_scheduler_type != "wsd":
        return num_warmup
    # the plateau gives way where warm-up and decay together are longer than the run
    return max(num_warmup, num_steps - _share_of_steps(config.wsd_decay_ratio, num_steps))


def lr_multiplier(step: int, num_steps: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step`, as a share of the peak, in [0, 1].

    `step` counts from 0 and is the step about to be taken; from `num_steps` on the decaying shapes stay at
    `min_lr_ratio`. A warm-up as long as the run or longer is cut off by its end, and nothing decays.

    Sources: cosine, https://arxiv.org/abs/1608.03983 equation 5 without restarts; wsd (warm-up, stable, decay),
    https://arxiv.org/abs/2404.06395 section 4, with a linear decay.
    """
    assert step >= 0 and num_steps >= 1, f"step {step} of {num_steps}"
    num_warmup = num_warmup_steps(num_steps, config)
    if step < num_warmup:
        return (step + 1) / num_warmup
    if config.lr_scheduler_type == "constant":
        return 1.0
    start = _decay_start(num_steps, num_warmup, config)
    if step < start:
        return 1.0
    # `step >= num_steps` first: there the decay may have no length (start == num_steps)
    progress = 1.0 if step >= num_steps else (step - start) / (num_steps - start)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_scheduler_type == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * share


def build_scheduler(optimizer: Optimizer, num_steps: int, config: TrainConfig) -> LambdaLR:
    """A torch scheduler over `lr_multiplier`; call its `step()` once after every optimizer step.

    Every parameter group keeps its own peak (the `lr` it was made with). The step counter is in `state_dict()`; the
    shape is not, it comes from `config` again.
    """
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: lr_multiplier(step, num_steps, config))
