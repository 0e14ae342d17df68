"""`auto`: when it steps during backward, decided from the last norms; and what never does."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.schedules import disturbed, local_tensors, same_bits, slow_down
from ranks.sharded import Setup, build, take_step

from heavylift.config.schema import Schedule, Tier
from heavylift.offload.options import TieredOptions
from heavylift.offload.pieces import Operation
from heavylift.offload.policy import CALM_SHARE, CALM_STEPS, SchedulePolicy

STEPS = make_steps(8, VOCAB)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("policy") / "odd", tied=False)


def told(policy: SchedulePolicy, *norms: float, limit: float = 1.0) -> list[bool]:
    """What the policy says after each norm."""
    answers = []
    for norm in norms:
        policy.observe(norm, struck=not norm <= limit)
        answers.append(policy.speculates)
    return answers


@pytest.mark.parametrize(
    ("schedule", "speculates"),
    [("synchronous", False), ("deferred", False), ("speculative", True), ("immediate", True)],
)
def test_fixed_schedules_stay_what_they_are(schedule: str, speculates: bool) -> None:
    policy = SchedulePolicy(Schedule(schedule), 0.0 if schedule == "immediate" else 1.0)
    assert policy.speculates is speculates
    assert told(policy, 0.1, 9.0, math.nan, *[0.1] * 6) == [speculates] * 9


def test_auto_without_clipping_speculates_from_the_start() -> None:
    policy = SchedulePolicy(Schedule.AUTO, 0.0)
    assert policy.speculates
    assert told(policy, 1e9, limit=math.inf) == [True]


def test_auto_waits_for_calm_steps_and_begins_anew_after_a_strike() -> None:
    assert CALM_STEPS == 4
    policy = SchedulePolicy(Schedule.AUTO, 1.0)
    assert not policy.speculates
    assert told(policy, 0.5, 0.5, 0.5, 0.5, 0.5) == [False, False, False, True, True]
    assert told(policy, 1.5, 0.5, 0.5, 0.5, 0.5) == [False, False, False, False, True]
    assert told(policy, math.nan, 0.5, 0.5, 0.5, 0.5) == [False, False, False, False, True]


def test_auto_pauses_while_the_norm_is_close_to_the_limit() -> None:
    assert CALM_SHARE == 0.9
    policy = SchedulePolicy(Schedule.AUTO, 2.0)
    assert told(policy, 1.0, 1.0, 1.0, 1.85, 1.75, 1.8, 1.0, limit=2.0) == [False] * 4 + [True, False, True]


def switching_job(folder: Path, limit: float) -> dict[str, Any]:
    """`auto` over eight steps of which the fifth spikes; what was announced before each step, and what was done."""
    engine = build(folder, Setup(schedule="auto", clip=limit))
    overlap = engine.optimizer._overlap
    assert overlap is not None
    announced = []
    counts = slow_down(engine.optimizer, 0.002)
    for index, rows in enumerate(STEPS):
        announced.append(overlap.speculate_next)
        with disturbed(engine.module, "spike") if index == 5 else nullcontext():
            take_step(engine, rows)
    engine.optimizer.synchronize()
    engine.optimizer.close()
    return {"announced": announced, "corrected": counts[Operation.CORRECT]}


def test_auto_switches_in_a_run(odd_llama: Path) -> None:
    """Four calm steps, then during backward; a spike is corrected, and it takes four calm steps again."""
    (free,) = run_on_ranks(1, switching_job, odd_llama, 0.0)
    assert free["announced"] == [True] * 8
    (limited,) = run_on_ranks(1, switching_job, odd_llama, 500.0)
    assert limited["announced"] == [False] * 4 + [True, True, False, False]
    assert free["corrected"] == 0 and limited["corrected"] == 5, "all groups of the one step that spiked"
    (strict,) = run_on_ranks(1, switching_job, odd_llama, 0.05)
    assert strict["announced"] == [False] * 8


NOTHING_LEFT = {
    "beta1": {"betas": (0.0, 0.999)},
    "beta2": {"betas": (0.9, 0.0)},
    "weights": {"lr": 1e-2, "weight_decay": 100.0},
    "nearly none of the weights": {"lr": 1e-2, "weight_decay": 99.999},
}
"""Hyperparameters with which a step leaves no trace of a moment, or of the weights."""


def nothing_left_job(folder: Path, schedule: str, edited: dict[str, Any], when: str) -> dict[str, Any]:
    """Such ones from the start, or edited in after two steps; then a step that must not be, and one that is good."""
    outcomes = {}
    for name in ("synchronous", schedule):
        engine = build(folder, Setup(schedule=name, clip=0.0 if schedule == "immediate" else 1e6))
        optimizer = engine.optimizer
        for step in range(2):
            if when == "start" or step == 1:
                optimizer.param_groups[0].update(edited)
            take_step(engine, STEPS[step])
        with disturbed(engine.module, "late"):
            skipped = take_step(engine, STEPS[2]).skipped
        take_step(engine, STEPS[3])
        outcomes[name] = {"tensors": local_tensors(engine), "skipped": skipped, "next": optimizer._speculates()}
        optimizer.close()
    a, b = outcomes["synchronous"]["tensors"], outcomes[schedule]["tensors"]
    return {
        "different": [name for name in a if not same_bits(a[name], b[name])],
        "skipped": outcomes[schedule]["skipped"],
        "speculates": outcomes[schedule]["next"],
    }


@pytest.mark.parametrize("when", ["start", "edited"])
@pytest.mark.parametrize("what", NOTHING_LEFT)
@pytest.mark.parametrize("schedule", ["speculative", "immediate"])
def test_a_step_that_leaves_nothing_is_not_taken_early(schedule: str, what: str, when: str, odd_llama: Path) -> None:
    (found,) = run_on_ranks(1, nothing_left_job, odd_llama, schedule, NOTHING_LEFT[what], when)
    assert found == {"different": [], "skipped": True, "speculates": False}


def test_immediate_refuses_clipping() -> None:
    with pytest.raises(ValueError, match="immediate knows no clipping: expected max_grad_norm 0, got 1.0"):
        TieredOptions(Tier.HOST, schedule=Schedule.IMMEDIATE, max_grad_norm=1.0)
