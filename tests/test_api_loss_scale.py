"""The loss scale moves by DeepSpeed's rules; a step that overflows leaves every bit, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.models import make_branches
from parity_api.runs import Case, ds_config, masters, whole
from ranks.pool import run_on_ranks

import heavylift
from heavylift.api.loss_scale import LossScaler
from heavylift.config.deepspeed.settings import LossScale
from heavylift.errors import UserError


def scales(settings: LossScale, overflows: str) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` none."""
    scaler = LossScaler(settings)
    seen = []
    for mark in overflows:
        scaler.update(mark == "x")
        seen.append(scaler.scale)
    return seen


@pytest.mark.parametrize(
    ("settings", "overflows", "expected"),
    [
        # doubles after `window` good steps, counted from the start and from the last overflow
        (LossScale(initial_scale=8, window=2, hysteresis=1), "..", [8, 16]),
        (LossScale(initial_scale=8, window=2, hysteresis=1), "x..x", [4, 4, 8, 4]),
        (LossScale(initial_scale=8, window=2, hysteresis=1), ".x..", [8, 4, 4, 8]),
        # the first `hysteresis` - 1 overflows cost nothing but the step
        (LossScale(initial_scale=8, window=9, hysteresis=3), "xxxx", [8, 8, 4, 2]),
        (LossScale(initial_scale=8, window=9, hysteresis=2), "x.x.x", [8, 8, 4, 4, 2]),
        # what is used up comes back when the scale grows...
        (LossScale(initial_scale=8, window=2, hysteresis=2), "x..xx", [8, 8, 16, 16, 8]),
        # ...or after every good step
        (LossScale(initial_scale=8, window=9, hysteresis=2, consecutive_hysteresis=True), "x.x.xx", [8, 8, 8, 8, 8, 4]),
        (LossScale(initial_scale=3, window=9, hysteresis=1, min_scale=2), "x", [2]),
        (LossScale(static_scale=128), "x..x", [128] * 4),
    ],
)
def test_the_scale_moves(settings: LossScale, overflows: str, expected: list[float]) -> None:
    assert scales(settings, overflows) == expected


def test_an_overflow_at_the_smallest_scale_ends_the_run_once_no_lives_are_left() -> None:
    with pytest.raises(UserError, match=r"smallest loss scale \(1\): the run diverges"):
        scales(LossScale(initial_scale=2, hysteresis=2), "xxx")


def test_a_scaler_goes_on_where_its_state_was_taken() -> None:
    settings = LossScale(initial_scale=8, window=3, hysteresis=2)
    first, second = LossScaler(settings), LossScaler(settings)
    for mark in "x..":
        first.update(mark == "x")
    second.load_state_dict(first.state_dict())
    for mark in ".xx.":
        first.update(mark == "x")
        second.update(mark == "x")
        assert first.scale == second.scale
    fixed = LossScaler(LossScale(static_scale=4.0))
    fixed.load_state_dict(first.state_dict())
    assert fixed.scale == 4.0


def overflow_job(cases: list[Case]) -> list[dict[str, Any]]:
    """A good step, one that is not finite on rank 1 alone, another good one."""
    return [overflow(case) for case in cases]


def overflow(case: Case) -> dict[str, Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2, "warmup_min_lr": 1e-3}}
    config = ds_config(case, dist.get_world_size(), scheduler=scheduler)
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine, optimizer, _, _ = heavylift.initialize(model=make_branches(), config=config)
    dtype = next(engine.module.parameters()).dtype
    rows = torch.ones(8, 5, dtype=dtype), torch.zeros(8, 1, dtype=dtype)

    def take(factor: float) -> None:
        for _ in range(case.accumulation):
            engine.backward(engine(*rows)["loss"] * factor)
            engine.step()

    def everything() -> dict[str, torch.Tensor]:
        from heavylift.api.checkpoint_states import saved_states
        from heavylift.api.checkpoint_writer import made

        trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        states = {n: whole(made(t)) for n, t in saved_states(optimizer, trained).items()}
        engine.settle()
        return {**states, **{f"param.{n}": whole(p) for n, p in trained.items()}}

    take(1.0)
    before, lr = everything(), engine.get_lr()
    take(float("nan") if dist.get_rank() == 1 else 1.0)
    after = everything()
    result = {
        "same": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
        "applied": engine.was_step_applied(),
        "counts": (engine.global_steps, engine.skipped_steps, engine.global_samples),
        "lr": engine.get_lr() == lr,
        "scale": engine.loss_scale(),
        "norm": engine.get_global_grad_norm(),
    }
    take(1.0)
    result["moved"] = not torch.equal(masters(engine)["inside.weight"], after["master.inside.weight"])
    result["last_norm"] = engine.get_global_grad_norm()
    engine.destroy()
    return result


def test_a_step_that_is_not_finite_is_skipped_whole() -> None:
    cases = [
        Case("branches", stage, device, precision, accumulation)
        for stage, device, precision, accumulation in (
            (0, "none", "fp16", 1),
            (1, "cpu", "fp16", 2),
            (2, "cpu", "bf16", 1),
            (3, "none", "bf16", 2),
            (3, "cpu", "fp16", 1),
            (3, "cpu", "fp32", 1),
        )
    ]
    per_rank = run_on_ranks(2, overflow_job, cases)
    for results in per_rank:
        for case, result in zip(cases, results, strict=True):
            assert result["same"] and result["moved"], case
            assert result["counts"] == (2, 1, 32), case
            assert result["applied"] is False and result["lr"], case
            assert result["scale"] == (8.0 if case.precision == "fp16" else 1.0), case
            assert not result["norm"] < float("inf"), case
            assert 0 < result["last_norm"] < 100, case


def diverging_job(_: Path) -> str:
    config = ds_config(Case("branches", 2, "none", "fp32"), 1)
    config["fp16"] = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}
    engine, *_ = heavylift.initialize(model=make_branches(), config=config)
    rows = torch.ones(16, 5).half(), torch.zeros(16, 1).half()
    with pytest.raises(UserError) as raised:
        for _ in range(3):
            engine.backward(engine(*rows)["loss"] * float("inf"))
            engine.step()
    engine.destroy()
    return f"{engine.skipped_steps}: {raised.value}"


def test_a_run_that_diverges_ends_with_one_line(tmp_path: Path) -> None:
    message = run_on_ranks(1, diverging_job, tmp_path)[0]
    assert message.startswith("2: fp16: a gradient is not finite at the smallest loss scale (1)")
    assert "\n" not in message
