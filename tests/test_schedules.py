"""Learning-rate schedules: exact values, edges, and the torch scheduler around them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from heavylift.config.schema import TrainConfig
from heavylift.train.schedules import build_scheduler, lr_multiplier, num_warmup_steps

SHAPES = ["cosine", "linear", "constant", "wsd"]


def config(**keys: Any) -> TrainConfig:
    return TrainConfig(output_dir="unused", **keys)


def multipliers(num_steps: int, **keys: Any) -> list[float]:
    return [lr_multiplier(step, num_steps, config(**keys)) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_scheduler_type": "constant"}, [1, 1, 1, 1]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"lr_scheduler_type": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"lr_scheduler_type": "linear", "warmup_ratio": 0.5}, [0.5, 1, 1, 0.5]),
        ({"lr_scheduler_type": "cosine"}, [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}, [0.5, 1, 1, 0.55]),
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.5}, [1, 1, 1, 0.5]),
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 1.0}, [1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.0}, [1, 1, 1, 1]),
        # decay and warm-up meet: the plateau and the start of the decay give way
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 1.0, "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
    ],
)
def test_exact_values_over_four_steps(keys: dict[str, Any], expected: list[float]) -> None:
    assert multipliers(4, **keys) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_peak_is_reached_and_never_exceeded_and_no_step_has_lr_zero(shape: str, warmup: int) -> None:
    values = multipliers(20, lr_scheduler_type=shape, warmup_steps=warmup)
    assert max(values) == values[max(warmup - 1, 0)] == 1
    assert min(values) > 0
    after = values[warmup:]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(("shape", "last"), [("cosine", 0.5 * (1 + math.cos(0.9 * math.pi))), ("linear", 0.1)])
def test_last_step_is_one_step_above_the_minimum(shape: str, last: float) -> None:
    assert multipliers(10, lr_scheduler_type=shape)[-1] == pytest.approx(last, abs=1e-12)
    assert multipliers(10, lr_scheduler_type=shape, min_lr_ratio=0.5)[-1] == pytest.approx(0.5 + 0.5 * last, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_the_run_the_multiplier_stays_at_the_minimum(shape: str) -> None:
    # torch asks for step `num_steps` when the scheduler is stepped after the last optimizer step
    keys = config(lr_scheduler_type=shape, min_lr_ratio=0.25)
    expected = 1.0 if shape == "constant" else 0.25
    assert lr_multiplier(10, 10, keys) == lr_multiplier(1000, 10, keys) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_one_step_is_taken_at_the_peak(shape: str) -> None:
    assert multipliers(1, lr_scheduler_type=shape) == [1.0]
    assert multipliers(1, lr_scheduler_type=shape, warmup_ratio=0.03) == [1.0]


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_as_long_as_the_run_ends_at_the_peak(shape: str) -> None:
    assert multipliers(4, lr_scheduler_type=shape, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert multipliers(4, lr_scheduler_type=shape, warmup_ratio=1.0) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_longer_than_the_run_is_cut_off(shape: str) -> None:
    assert multipliers(3, lr_scheduler_type=shape, warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(("ratio", "num_steps", "expected"), [(0.07, 100, 7), (0.03, 10, 1), (0.1, 30, 3), (0.0, 9, 0)])
def test_warmup_ratio_rounds_up_but_not_for_floating_point_dust(ratio: float, num_steps: int, expected: int) -> None:
    assert num_warmup_steps(num_steps, config(warmup_ratio=ratio)) == expected


def _optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (1e-3, 4e-5)]
    return torch.optim.SGD(groups, lr=1.0)


def _take(optimizer: torch.optim.Optimizer, scheduler: Any, num: int) -> list[list[float]]:
    used = []
    for _ in range(num):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("shape", SHAPES)
def test_scheduler_gives_each_group_its_own_peak(shape: str) -> None:
    keys = config(lr_scheduler_type=shape, warmup_steps=2)
    optimizer = _optimizer()
    used = _take(optimizer, build_scheduler(optimizer, 6, keys), 6)
    expected = [[lr * lr_multiplier(step, 6, keys) for lr in (1e-3, 4e-5)] for step in range(6)]
    assert used == expected


def test_scheduler_resumes_from_its_state_dict() -> None:
    keys = config(lr_scheduler_type="cosine", warmup_steps=2)
    whole = _optimizer()
    expected = _take(whole, build_scheduler(whole, 8, keys), 8)

    first = _optimizer()
    first_scheduler = build_scheduler(first, 8, keys)
    _take(first, first_scheduler, 3)
    second = _optimizer()
    second_scheduler = build_scheduler(second, 8, keys)
    second.load_state_dict(first.state_dict())
    second_scheduler.load_state_dict(first_scheduler.state_dict())
    assert _take(second, second_scheduler, 5) == expected[3:]
