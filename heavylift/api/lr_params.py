"""What the parameters of the ds_config schedulers take, and how a wrong one is told.

Types as JSON has them: 1e3 is a whole number here, true is not a number. Left out: relations between parameters.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

from heavylift.config.words import shown


class Kind(Enum):
    """What one parameter takes; the value is the wording of the error."""

    STEPS = "a whole number of steps, at least 1"
    STEPS_OR_ZERO = "a whole number of steps, at least 0"
    NUMBER = "a number"
    NONNEGATIVE = "a number of at least 0"
    LR = "a learning rate of at least 0, or a list with one for each parameter group"
    LR_OR_NONE = "a learning rate of at least 0, a list with one for each parameter group, or null"
    MOMENTUM = "a momentum from 0 below 1, or a list with one for each parameter group"
    STEPS_OR_ZERO_OR_NONE = "a whole number of steps, at least 0, or null"
    BOOL = "true or false"
    WARMUP_TYPE = "log or linear"


def param_problems(kinds: dict[str, Kind], params: dict[str, Any], num_groups: int) -> list[str]:
    """One line `key: expected ..., got ...` for each value in `params` that is not of its kind.

    `num_groups`: parameter groups of the optimizer, the length of a list of values.
    """
    problems = []
    for key, value in params.items():
        kind = kinds[key]
        if isinstance(value, list | tuple) and kind in _PER_GROUP and len(value) != num_groups:
            problems.append(
                f"{key}: expected one value for each of the optimizer's {num_groups} parameter groups, got {len(value)}"
            )
        elif not _accepts(kind, value):
            # "auto" is filled in by whoever knows the run: Hugging Face's Trainer, or our own parser
            hint = "; nothing here can resolve it, give the number" if value == "auto" else ""
            problems.append(f"{key}: expected {kind.value}, got {shown(value)}{hint}")
    return problems


_PER_GROUP = (Kind.LR, Kind.LR_OR_NONE, Kind.MOMENTUM)
_MAY_BE_NONE = (Kind.LR_OR_NONE, Kind.STEPS_OR_ZERO_OR_NONE)


def _accepts(kind: Kind, value: Any) -> bool:
    if value is None:
        return kind in _MAY_BE_NONE
    if kind is Kind.BOOL:
        return isinstance(value, bool)
    if kind is Kind.WARMUP_TYPE:
        return value in ("log", "linear") if isinstance(value, str) else False
    if isinstance(value, list | tuple):
        return kind in _PER_GROUP and all(_accepts_number(kind, one) for one in value)
    return _accepts_number(kind, value)


def _accepts_number(kind: Kind, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if kind is Kind.STEPS:
        return value >= 1 and value == int(value)
    if kind in (Kind.STEPS_OR_ZERO, Kind.STEPS_OR_ZERO_OR_NONE):
        return value >= 0 and value == int(value)
    if kind is Kind.MOMENTUM:
        return 0 <= value < 1
    return kind is Kind.NUMBER or value >= 0
