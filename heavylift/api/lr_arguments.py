"""The command-line arguments that scripts give a scheduler with, and the `scheduler` block made of them.

Names and defaults are those that DeepSpeed scripts pass. Left out: `cycle_momentum` off (the switch only turns it on,
and it is on by default).
"""

from __future__ import annotations

import argparse
from typing import Any

from heavylift.api.lr_schedules import SCHEDULERS, VALID_LR_SCHEDULES

# argument: (type, default, help). -1 stands for "not given"
_ARGUMENTS: dict[str, tuple[type, Any, str]] = {
    "lr_schedule": (str, None, "scheduler: " + ", ".join(VALID_LR_SCHEDULES)),
    "lr_range_test_min_lr": (float, 0.001, "LRRangeTest: learning rate to start from"),
    "lr_range_test_step_rate": (float, 1.0, "LRRangeTest: how much an interval adds, in starting rates"),
    "lr_range_test_step_size": (int, 1000, "LRRangeTest: optimizer steps in an interval"),
    "lr_range_test_staircase": (bool, False, "LRRangeTest: rise at the end of an interval only"),
    "cycle_first_step_size": (int, 1000, "OneCycle: optimizer steps of the rise"),
    "cycle_first_stair_count": (int, -1, "OneCycle: stairs of the rise (-1: smooth)"),
    "cycle_second_step_size": (int, -1, "OneCycle: optimizer steps of the fall (-1: as the rise)"),
    "cycle_second_stair_count": (int, -1, "OneCycle: stairs of the fall (-1: as the rise)"),
    "decay_step_size": (int, 1000, "OneCycle: optimizer steps of a decay interval after the cycle"),
    "cycle_min_lr": (float, 0.01, "OneCycle: lowest learning rate of the cycle"),
    "cycle_max_lr": (float, 0.1, "OneCycle: highest learning rate"),
    "decay_lr_rate": (float, 0.0, "OneCycle: how fast the learning rate decays after the cycle"),
    "cycle_momentum": (bool, False, "OneCycle: move momentum against the learning rate"),
    "cycle_min_mom": (float, 0.8, "OneCycle: lowest momentum"),
    "cycle_max_mom": (float, 0.9, "OneCycle: highest momentum"),
    "decay_mom_rate": (float, 0.0, "OneCycle: how fast momentum changes after the cycle"),
    "warmup_min_lr": (float, 0.0, "WarmupLR, WarmupDecayLR: learning rate to start from"),
    "warmup_max_lr": (float, 0.001, "WarmupLR, WarmupDecayLR: learning rate after warm-up"),
    "warmup_num_steps": (int, 1000, "optimizer steps of warm-up"),
    "warmup_type": (str, "log", "shape of warm-up: log or linear"),
    "total_num_steps": (int, None, "WarmupDecayLR, WarmupCosineLR: optimizer steps of the whole run"),
    "warmup_min_ratio": (float, 0.01, "WarmupCosineLR: share of the learning rate to start from"),
    "cos_min_ratio": (float, 0.01, "WarmupCosineLR: share of the learning rate at the end"),
}
_NOT_GIVEN = {"cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the scheduler's arguments to `parser` and returns it."""
    group = parser.add_argument_group("learning rate", "which scheduler, and its parameters")
    for name, (kind, default, text) in _ARGUMENTS.items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """(`scheduler` block, None), or (None, what is wrong) where `args` names no scheduler or an unknown one."""
    given = vars(args)
    name = given.get("lr_schedule")
    if name is None:
        return None, "--lr_schedule is not given"
    if name not in SCHEDULERS:
        return None, f"--lr_schedule: expected one of {', '.join(VALID_LR_SCHEDULES)}, got {name}"
    params = {
        key: given[key]
        for key in SCHEDULERS[name].KINDS
        if given.get(key) is not None and not (key in _NOT_GIVEN and given[key] == -1) and key != "cycle_momentum"
    }
    if given.get("cycle_momentum"):
        params["cycle_momentum"] = True
    return {"type": name, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """(highest learning rate that a `scheduler` block names, ""), or (None, why it names none)."""
    name, params = config.get("type"), config.get("params")
    if name is None or params is None:
        return None, "the scheduler block needs type and params"
    if name not in SCHEDULERS:
        return None, f"scheduler.type: expected one of {', '.join(VALID_LR_SCHEDULES)}, got {name}"
    key = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    if key not in params:
        return None, f"{name}: its params name no {key}"
    return params[key], ""
