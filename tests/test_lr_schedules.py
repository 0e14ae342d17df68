"""The ds_config schedulers give every optimizer step the rate that DeepSpeed gives it.

The literals are what DeepSpeed 0.19.8 set, step by step, when it was run with these parameters.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch

from heavylift.api.lr_arguments import add_tuning_arguments, get_config_from_args, get_lr_from_config
from heavylift.api.lr_base import Scheduler
from heavylift.api.lr_one_cycle import OneCycle
from heavylift.api.lr_schedules import (
    SCHEDULERS,
    LRRangeTest,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    make_scheduler,
)
from heavylift.config.deepspeed.settings import SchedulerSettings
from heavylift.errors import UserError


def optimizer_of(*lrs: float, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    """An optimizer with one scalar parameter per group."""
    return kind([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs])


def used(name: str, params: dict[str, Any], num_steps: int, lr: float = 0.01) -> tuple[list[float], list[float]]:
    """(learning rate, beta1) that each of `num_steps` optimizer steps uses."""
    optimizer = optimizer_of(lr)
    scheduler = make_scheduler(SchedulerSettings(name, params), optimizer)
    lrs, momentums = [], []
    for _ in range(num_steps):
        lrs.append(optimizer.param_groups[0]["lr"])
        momentums.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        scheduler.step()
    return lrs, momentums


CURVES: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "WarmupLR",
        {"warmup_min_lr": 0.001, "warmup_max_lr": 0.009, "warmup_num_steps": 4},
        [0.001, 0.001, 0.005, 0.00733985000288, 0.009, 0.009, 0.009, 0.009],
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01],
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 8,
            "warmup_num_steps": 4,
            "warmup_max_lr": 0.01,
            "warmup_min_lr": 0.002,
            "warmup_type": "linear",
        },
        [0.002, 0.002, 0.004, 0.006, 0.008, 0.01, 0.008, 0.006, 0.004, 0.002, 0.002, 0.002],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 6, "warmup_num_steps": 2},
        [0.0, 0.0, 0.001, 0.001, 0.00075, 0.0005, 0.00025, 0.0, 0.0],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 8,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
        [0.0, 0.001, 0.00325, 0.0055, 0.00775, 0.00882842712475, 0.006, 0.00317157287525, 0.002, 0.002, 0.002],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 5, "warmup_num_steps": 2},
        [0.0, 0.0, 0.01, 0.00750025, 0.00250075, 1e-06, 1e-06, 1e-06],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0},
        [0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
        [0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004, 0.004],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.005,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "decay_lr_rate": 1.0,
            "decay_step_size": 2,
        },
        [0.001, 0.002, 0.003, 0.004, 0.005, 0.003, 0.001, 0.000666666666667, 0.0005, 0.0004, 0.000333333333333],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.009,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "decay_mom_rate": -0.5,
            "decay_step_size": 1,
        },
        [0.001, 0.001, 0.005, 0.005, 0.009, 0.005, 0.005, 0.001, 0.001, 0.001, 0.001],
    ),
]


@pytest.mark.parametrize(("name", "params", "curve"), CURVES)
def test_each_step_uses_the_same_rate(name: str, params: dict[str, Any], curve: list[float]) -> None:
    assert used(name, params, len(curve))[0] == pytest.approx(curve, rel=1e-11, abs=1e-15)


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    _, momentums = used(*CURVES[-2][:2], num_steps=9)
    assert momentums == pytest.approx([0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9, 0.9])
    _, momentums = used(*CURVES[-1][:2], num_steps=12)
    assert momentums == pytest.approx([0.8, 0.9, 0.85, 0.85, 0.8, 0.85, 0.85, 0.9, 0.9, 0.45, 0, 0])


def test_momentum_that_grows_after_the_cycle_stays_below_one() -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1, "cycle_first_step_size": 1, "decay_step_size": 1}
    _, momentums = used("OneCycle", {**params, "decay_mom_rate": 0.05}, num_steps=8)
    assert momentums[3:] == pytest.approx([0.945, 0.99, 0.999, 0.999, 0.999])


def test_one_cycle_without_momentum_and_for_an_optimizer_without_betas() -> None:
    optimizer = optimizer_of(0.1)
    scheduler = OneCycle(optimizer, 0.0, 0.1, cycle_first_step_size=2, cycle_momentum=False)
    scheduler.step()
    assert (optimizer.param_groups[0]["betas"], scheduler.get_mom()) == ((0.9, 0.999), None)
    sgd = optimizer_of(0.1, kind=torch.optim.SGD)
    with pytest.warns(UserWarning, match="SGD has no betas"):
        scheduler = OneCycle(sgd, 0.0, 0.1, cycle_first_step_size=2)
    scheduler.step()
    assert "betas" not in sgd.param_groups[0] and sgd.param_groups[0]["lr"] == 0.05


def test_a_default_warmup_is_1000_steps_of_logarithm_to_the_optimizers_rate() -> None:
    optimizer = optimizer_of(0.3)
    scheduler = WarmupLR(optimizer)
    scheduler.step(499)
    assert scheduler.get_last_lr() == pytest.approx([0.3 * math.log(500) / math.log(1000)])
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.3 * math.log(501) / math.log(1000)])
    scheduler.step(1000)
    assert scheduler.get_last_lr() == [0.3]


def test_parameter_groups_keep_their_own_rates() -> None:
    optimizer = optimizer_of(0.1, 0.2)
    scheduler: Scheduler = WarmupDecayLR(optimizer, 10, [0.0, 0.01], [0.1, 0.21], 2, "linear")
    for _ in range(2):
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.05, 0.11])
    scheduler = WarmupCosineLR(optimizer_of(0.1, 0.2), 10, warmup_num_steps=2, warmup_type="linear")
    for _ in range(2):
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.05, 0.1])


def test_a_rate_in_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.ones(1))
    scheduler = WarmupLR(torch.optim.AdamW([parameter], lr=rate), 0.0, 1.0, 4, "linear")
    assert float(rate) == 0.0
    for _ in range(3):
        scheduler.step()
    assert float(rate) == 0.5


@pytest.mark.parametrize(("name", "params"), [curve[:2] for curve in CURVES])
def test_a_resumed_run_goes_on_with_the_same_rates_and_momenta(name: str, params: dict[str, Any]) -> None:
    settings = SchedulerSettings(name, params)
    whole, optimizer = [], optimizer_of(0.01)
    scheduler = make_scheduler(settings, optimizer)
    for _ in range(10):
        whole.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        scheduler.step()
    for stop in (1, 5, 7):
        first = make_scheduler(settings, optimizer_of(0.01))
        for _ in range(stop):
            first.step()
        state = first.state_dict()
        assert state == {"last_batch_iteration": stop - 1}
        resumed = optimizer_of(0.01)
        scheduler = make_scheduler(settings, resumed)
        scheduler.load_state_dict(state)
        seen = []
        for _ in range(stop, 10):
            seen.append((resumed.param_groups[0]["lr"], resumed.param_groups[0]["betas"]))
            scheduler.step()
        assert seen[0][0] == whole[stop][0] and seen == whole[stop:]


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_a_state_from_before_the_first_step_is_the_start(name: str) -> None:
    params = {**next(curve[1] for curve in CURVES if curve[0] == name)}
    optimizer = optimizer_of(0.01)
    scheduler = make_scheduler(SchedulerSettings(name, params), optimizer)
    before = (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"])
    scheduler.load_state_dict(scheduler.state_dict())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == before


def test_a_later_start_leaves_the_optimizer_alone_until_the_first_step() -> None:
    optimizer = optimizer_of(0.07)
    scheduler = LRRangeTest(optimizer, 0.1, 10, last_batch_iteration=3)
    assert optimizer.param_groups[0]["lr"] == 0.07
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 1.5)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_warmup_has_two_steps_at_least(given: int) -> None:
    lrs, _ = used("WarmupLR", {"warmup_num_steps": given, "warmup_type": "linear"}, 5)
    assert lrs == [0, 0, 0.005, 0.01, 0.01]


def test_numbers_as_json_has_them() -> None:
    whole, _ = used("WarmupDecayLR", {"total_num_steps": 8.0, "warmup_num_steps": 4e0, "warmup_max_lr": 1}, 10)
    assert max(whole) == 1.0


def test_a_run_shorter_than_its_warmup_is_told(caplog: pytest.LogCaptureFixture) -> None:
    WarmupDecayLR(optimizer_of(0.1), 5, warmup_num_steps=5)
    assert not caplog.messages
    WarmupDecayLR(optimizer_of(0.1), 3, warmup_num_steps=5)
    assert len(caplog.messages) == 1
    assert "total_num_steps 3 is less than warmup_num_steps 5" in caplog.messages[0]


@pytest.mark.parametrize(
    ("name", "params", "problems"),
    [
        ("WarmupRL", {}, ["scheduler.type: expected one of", "got WarmupRL; did you mean WarmupLR?"]),
        ("cosine", {}, ["got cosine; choose one of these"]),
        ("WarmupLR", {"warmup_num_step": 3}, ["params.warmup_num_step: not a parameter of WarmupLR; did you mean"]),
        ("WarmupDecayLR", {}, ["params.total_num_steps: missing; WarmupDecayLR needs a whole number of steps"]),
        ("OneCycle", {}, ["params.cycle_min_lr: missing", "params.cycle_max_lr: missing"]),
        ("WarmupLR", {"warmup_num_steps": "auto"}, ["expected a whole number of steps, at least 0, got 'auto'; noth"]),
        (
            "WarmupLR",
            {"warmup_num_steps": -1, "warmup_type": "cubic"},
            ["at least 0, got -1", "log or linear, got 'cub"],
        ),
        ("WarmupLR", {"warmup_num_steps": True}, ["got true"]),
        (
            "WarmupLR",
            {"warmup_max_lr": [0.1, 0.2, 0.3]},
            ["one value for each of the optimizer's 2 parameter groups, g"],
        ),
        ("WarmupLR", {"warmup_min_lr": -1e-3}, ["at least 0, or a list with one for each parameter group, got -0.001"]),
        ("WarmupLR", {"warmup_max_lr": float("nan")}, ["got nan"]),
        ("WarmupCosineLR", {"total_num_steps": 7.5}, ["params.total_num_steps: expected a whole number", "got 7.5"]),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.0},
            ["a momentum from 0 below 1", "1.0"],
        ),
        ("LRRangeTest", {"lr_range_test_staircase": "yes"}, ["expected true or false, got 'yes'"]),
        (
            "LRRangeTest",
            {"last_batch_iteration": -2},
            ["last_batch_iteration: expected a whole number from -1, got -2"],
        ),
    ],
)
def test_bad_blocks_are_told_in_one_line_each(name: str, params: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make_scheduler(SchedulerSettings(name, params), optimizer_of(0.1, 0.1))
    assert all(problem in str(caught.value) for problem in problems), str(caught.value)
    assert all("\n" not in problem and problem.startswith("scheduler.") for problem in caught.value.problems)


def test_a_bad_argument_from_python_names_the_class() -> None:
    with pytest.raises(UserError, match=r"WarmupLR\.warmup_num_steps: expected a whole number"):
        WarmupLR(optimizer_of(0.1), warmup_num_steps=-1)
    with pytest.raises(UserError, match=r"WarmupDecayLR\.total_num_steps: expected a whole number"):
        WarmupDecayLR(optimizer_of(0.1), 0)


def test_arguments_of_a_command_line_become_a_block() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    line = "--lr_schedule OneCycle --cycle_min_lr 0.1 --cycle_max_lr 0.4 --cycle_first_step_size 2 --cycle_momentum"
    block, problem = get_config_from_args(parser.parse_args(line.split()))
    assert block is not None and problem is None
    lrs, _ = used(block["type"], block["params"], 4)
    assert lrs == pytest.approx([0.1, 0.25, 0.4, 0.25])
    assert get_lr_from_config(block) == (0.4, "")
    decay = parser.parse_args(["--lr_schedule", "WarmupDecayLR", "--total_num_steps", "2000"])
    block, _ = get_config_from_args(decay)
    assert block is not None
    assert isinstance(
        make_scheduler(SchedulerSettings(block["type"], block["params"]), optimizer_of(1.0)), WarmupDecayLR
    )


def test_command_lines_and_blocks_without_a_scheduler() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    assert get_config_from_args(parser.parse_args([])) == (None, "--lr_schedule is not given")
    block, problem = get_config_from_args(parser.parse_args(["--lr_schedule", "Warmup"]))
    assert block is None and problem is not None and "got Warmup" in problem
    assert get_lr_from_config({"type": "WarmupCosineLR", "params": {}})[0] is None
    assert "needs type and params" in get_lr_from_config({"type": "WarmupLR"})[1]


@pytest.mark.parametrize(("name", "params", "curve"), CURVES[:-1])
def test_a_ds_config_gives_the_same_curve(name: str, params: dict[str, Any], curve: list[float]) -> None:
    from heavylift.config.deepspeed.parse import load_settings

    block = {"type": name, "params": params}
    settings = load_settings({"train_batch_size": 8, "scheduler": block}, world_size=1).scheduler
    assert settings is not None
    assert used(settings.name, settings.params, len(curve))[0] == pytest.approx(curve, rel=1e-11, abs=1e-15)
