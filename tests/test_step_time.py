"""What counts as the time of a step: from end to end, without evaluations. The clock is one that the test turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from ranks.pool import run_on_ranks

STEP_S, EVALUATION_S, REPORT_S, TRACE_S = 1.0, 64.0, 0.25, 32.0


class Clock:
    """Seconds that pass only in what `slow` has made slow. They are multiples of 1/4: sums are exact."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def slow(self, action: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The action, which takes so long."""

        def slowed(*args: Any, **options: Any) -> Any:
            self.now_s += seconds
            return action(*args, **options)

        return slowed

    def slow_if_true(self, action: Callable[..., bool], seconds: float) -> Callable[..., bool]:
        """`action`, which takes so long when it says that it takes long."""

        def slowed(*args: Any, **options: Any) -> bool:
            takes_long = action(*args, **options)
            self.now_s += seconds if takes_long else 0
            return takes_long

        return slowed


def train_job(recipe: Path) -> list[float]:
    """Trains as the recipe says; the seconds of each step."""
    from heavylift.config.recipe import load_recipe
    from heavylift.train import loop, setup, trace

    clock = Clock()
    with patch.object(setup, "start_process_group", lambda ranks: None):  # it runs already
        run = setup.set_up(load_recipe(recipe))
    run.engine.train_step = clock.slow(run.engine.train_step, STEP_S)  # type: ignore[method-assign]
    run.engine.evaluate = clock.slow(run.engine.evaluate, EVALUATION_S)  # type: ignore[method-assign]
    with (
        patch.object(loop, "time", SimpleNamespace(perf_counter=lambda: clock.now_s, time=lambda: clock.now_s)),
        patch.object(loop.Reporter, "step", clock.slow(loop.Reporter.step, REPORT_S)),
        patch.object(trace.Tracer, "begin_step", clock.slow_if_true(trace.Tracer.begin_step, TRACE_S)),
        patch.object(trace.Tracer, "end_step", clock.slow_if_true(trace.Tracer.end_step, TRACE_S)),
    ):
        history = loop.train(run)
    run.engine.optimizer.close()
    return [step.step_s for step in history.steps]


def reports(times: list[float]) -> list[bool]:
    """Which of them have a report of the step before in them; they have nothing else but the step."""
    assert set(times) <= {STEP_S, STEP_S + REPORT_S}, times
    return [seconds > STEP_S for seconds in times]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_an_evaluation_is_not_counted_in_the_step_after_it(tier: str, write_recipe: Callable[..., Path]) -> None:
    train = {"max_steps": 6, "eval_steps": 2}
    recipe = write_recipe(train=train, data={"val_size": 2}, engine={"offload_optimizer": tier}, export={"save": False})
    (times,) = run_on_ranks(1, train_job, recipe)
    # before the first, after the second, the fourth and the last
    assert reports(times) == [False, True, False, True, False, True]


def test_without_evaluations_every_second_counts(write_recipe: Callable[..., Path]) -> None:
    (times,) = run_on_ranks(1, train_job, write_recipe(train={"max_steps": 4}, export={"save": False}))
    assert reports(times) == [False, True, True, True]


def test_the_trace_is_not_counted(write_recipe: Callable[..., Path]) -> None:
    recipe = write_recipe(train={"max_steps": 6, "profile": True}, export={"save": False})
    (times,) = run_on_ranks(1, train_job, recipe)
    # recording begins before the third, and the file is written after the fifth
    assert reports(times) == [False, True, False, True, True, False]
