"""What a user gives an AdamW beside its options: hyperparameters and parameters. Checked where they can be told of it,
and not on another thread, steps later. Left out: options (`heavylift.offload.options`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from heavylift.config.schema import Tier
from heavylift.errors import UserError
from heavylift.offload.groups import Group
from heavylift.offload.options import TieredOptions

MIN_DECAY = 0.5
"""A step that leaves less than this share of the weights (1 - lr * weight_decay) is not done before the norm is known:
taking it back divides their roundings by that share."""


def check_hyperparameters(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises UserError, a ValueError, for what AdamW cannot step with: as `torch.optim.AdamW`, and also later than at
    construction, for what a learning-rate scheduler may set."""
    for index, group in enumerate(param_groups):
        for name in ("lr", "eps", "weight_decay"):
            if not _is_within(group[name], math.inf):
                raise UserError(f"optimizer: parameter group {index}: {name} should be at least 0, got {group[name]!r}")
        betas = group["betas"]
        if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_within(beta, 1) for beta in betas)):
            raise UserError(
                f"optimizer: parameter group {index}: betas should be two numbers, at least 0 and below 1, got "
                f"{betas!r}"
            )


def _is_within(value: Any, below: float) -> bool:
    """Whether it is a number, a tensor of one element included, from 0 on."""
    try:
        return not isinstance(value, (bool, str)) and 0 <= float(value) < below
    except (TypeError, ValueError, RuntimeError):
        return False


def frozen_places(param_groups: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, torch.Tensor], ...]:
    """(parameter group, parameter) of all that are not trained."""
    return tuple(
        (i, param) for i, group in enumerate(param_groups) for param in group["params"] if not param.requires_grad
    )


def check_still_frozen(frozen: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Raises UserError where one of `frozen_places` is trained by now: it has no states, and no step would reach it."""
    for index, param in frozen:
        if param.requires_grad:
            raise UserError(
                f"optimizer: parameter group {index}: a parameter of shape {tuple(param.shape)} was frozen when the "
                "optimizer was made, which keeps no states for it, and is trainable now; make the optimizer while it "
                "is (it may be frozen afterwards), or make a new one"
            )


def can_be_taken_back(param_groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether enough is left of the state before a step to find it again; see `heavylift.offload.correction`."""
    return all(
        min(group["betas"]) > 0 and 1 - float(group["lr"]) * group["weight_decay"] >= MIN_DECAY
        for group in param_groups
    )


def check_groups(groups: Sequence[Group], trained: Iterable[torch.Tensor], options: TieredOptions) -> None:
    """Raises UserError, a ValueError, where gather groups do not hold exactly the `trained` parameters, and for devices
    and dtypes that one optimizer cannot serve."""
    names = {segment.param: f"{segment.name} of group {group.name}" for group in groups for segment in group.segments}
    trained = set(trained)
    strangers, missing = [name for param, name in names.items() if param not in trained], trained - names.keys()
    if strangers:
        raise UserError(
            f"groups: {len(strangers)} of {len(names)} parameters are in no parameter group, {strangers[0]} for one; "
            "give the optimizer all trainable parameters of the groups, or freeze these before the groups are made"
        )
    if missing:
        shape = tuple(next(iter(missing)).shape)
        raise UserError(
            f"groups: {len(missing)} of {len(trained)} trained parameters are in none of them, one of shape {shape}; "
            "make groups of all modules that are trained"
        )
    devices = sorted({str(group.device) for group in groups})
    if len(devices) > 1:
        raise UserError(f"optimizer: parameters lie on {' and '.join(devices)}; make one optimizer for each device")
    dtypes = sorted({str(group.dtype).removeprefix("torch.") for group in groups})
    if len(dtypes) > 1 and options.tier is Tier.HOST and options.ratio > 0:
        raise UserError(
            f"optimizer: parameters of {' and '.join(dtypes)} cannot share the host tier; make one optimizer for each "
            "dtype, or take tier device"
        )
