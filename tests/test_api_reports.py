"""What a configuration asks to be told is told, at the right steps, by rank 0 only. A plain loop plays the engine."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity_api.small import warnings_of
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.api import activation_checkpointing as checkpointing
from heavylift.api.recompute import recompute_layers
from heavylift.api.reports import EngineReports, StepFacts, check_reports
from heavylift.config.deepspeed.settings import (
    BatchSizes,
    CheckpointingSettings,
    FlopsProfilerSettings,
    MonitorSettings,
    Settings,
)
from heavylift.errors import UserError

CPU = torch.device("cpu")
PLAIN = Settings(batch=BatchSizes(train_batch=16, micro_batch=4, accumulation=2))


def train(settings: Settings, num_steps: int, rank: int = 0) -> tuple[list[str], list[float]]:
    """(lines said, mean loss of each step) of `num_steps` steps of two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    said: list[str] = []
    reports = EngineReports(settings, model, CPU, rank, say=said.append)
    losses = []
    for step in range(num_steps):
        found = []
        for micro in range(2):
            with reports.forward(step):
                loss = model(torch.randn(4, 8)).square().mean()
            reports.saw_loss(loss / 2, factor=2)
            with reports.backward():
                (loss / 2).backward()
            found.append(loss.item())
            facts = None
            if micro == 1:
                with reports.step():
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = 0.5 / (step + 2)  # as a scheduler would
                facts = StepFacts(step + 1, 0, 16 * (step + 1), [0.5 / (step + 2)], [(0.9, 0.999)], loss_scale=2.0**16)
            reports.micro_step_done(facts)
        losses.append(sum(found) / 2)
    reports.close()
    return said, losses


def column(folder: Path, name: str) -> list[tuple[int, float]]:
    with open(folder / "job" / f"Train_Samples_{name}.csv", newline="") as file:
        return [(int(x), float(value)) for x, value in list(csv.reader(file))[1:]]


def monitored(folder: Path) -> Settings:
    return replace(PLAIN, monitors=(MonitorSettings("csv", {"output_path": str(folder), "job_name": "job"}),))


def test_nothing_asked_nothing_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(PLAIN, 3)[0] == []
    assert capsys.readouterr() == ("", "")


def test_monitors_get_every_step_by_samples(tmp_path: Path) -> None:
    _, losses = train(monitored(tmp_path), 3)
    assert column(tmp_path, "lr") == [(16, 0.25), (32, pytest.approx(0.5 / 3)), (48, 0.125)]
    assert column(tmp_path, "train_loss") == [(16 * k, pytest.approx(loss)) for k, loss in enumerate(losses, 1)]
    assert column(tmp_path, "loss_scale") == [(16, 65536.0), (32, 65536.0), (48, 65536.0)]
    assert not list(tmp_path.glob("job/*elapsed*"))


def test_breakdown_is_said_and_monitored(tmp_path: Path) -> None:
    said, _ = train(replace(monitored(tmp_path), wall_clock_breakdown=True, steps_per_print=2), 5)
    times = [line for line in said if "time (ms)" in line]
    assert [line.split(" | ")[0] for line in times] == ["step=2", "step=4"]
    phases = ["forward", "backward", "backward_inner", "step"]
    assert [cell.split(":")[0] for cell in times[0].split(" | ")[2:]] == phases
    for phase in phases:
        assert [x for x, ms in column(tmp_path, f"elapsed_time_ms_{phase}") if ms > 0] == [32, 64]


def test_progress_is_said_every_few_steps() -> None:
    said, _ = train(replace(PLAIN, steps_per_print=2), 6)
    assert [line.split(", ")[0] for line in said] == ["step=2", "step=4", "step=6"]
    assert said[0] == "step=2, skipped=0, lr=[0.16666666666666666], mom=[(0.9, 0.999)]"
    # the first two steps are warm-up: there is no speed to tell before the third
    assert "samples/s=" in said[1] and "samples/s=" in said[2]


def test_memory_is_said_with_and_without_the_breakdown() -> None:
    said, _ = train(replace(PLAIN, memory_breakdown=True), 2)
    assert [line.split(" | ")[0] for line in said] == ["step=1", "step=2"]
    assert all("memory (GiB): host" in line for line in said)
    said, _ = train(replace(PLAIN, memory_breakdown=True, wall_clock_breakdown=True), 2)
    assert len(said) == 2 and all("time (ms)" in line and "memory (GiB): host" in line for line in said)


def test_flops_are_told_once_after_the_step_that_was_asked_for(tmp_path: Path) -> None:
    asked = FlopsProfilerSettings(enabled=True, profile_step=2, output_file=tmp_path / "profile.txt")
    train(replace(PLAIN, flops_profiler=asked), 2)
    assert not (tmp_path / "profile.txt").exists()
    train(replace(PLAIN, flops_profiler=asked), 4)
    text = (tmp_path / "profile.txt").read_text()
    assert "flops profile, step 3" in text
    # one micro-batch of 4 rows: 2 x 4 x (8 x 16 + 16)
    assert "forward FLOPs per process                 1.15 kFLOPS" in text, text


def test_what_cannot_be_told_is_said_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = FlopsProfilerSettings(enabled=True, output_file=tmp_path / "file" / "profile.txt")
    bad = replace(PLAIN, flops_profiler=asked, monitors=(MonitorSettings("mlflow", {}),))
    with pytest.raises(UserError) as caught:
        check_reports(bad)
    monitor, profile = caught.value.problems
    assert monitor.startswith("monitor mlflow: expected one of tensorboard, csv")
    assert profile == (
        f"flops_profiler.output_file: {tmp_path}/file/profile.txt cannot be written: Not a directory; change the path"
    )
    check_reports(replace(monitored(tmp_path), flops_profiler=replace(asked, output_file=tmp_path / "a" / "b.txt")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        heavylift.initialize(model=nn.Linear(2, 2), config=replace(bad, monitors=()))
    dist.destroy_process_group()


def test_a_profile_that_cannot_be_written_in_the_end_does_not_end_training(tmp_path: Path) -> None:
    asked = FlopsProfilerSettings(enabled=True, profile_step=1, output_file=tmp_path / "profile.txt")
    (tmp_path / "profile.txt").mkdir()
    told = warnings_of(lambda: train(replace(PLAIN, flops_profiler=asked), 3))
    assert told == [
        f"flops_profiler.output_file: {tmp_path}/profile.txt cannot be written: Is a directory; change the path"
    ]


def recompute_job() -> list[str]:
    """What a block that asks for recomputation says where nothing is recomputed by itself."""
    asked = CheckpointingSettings(enabled=True)
    told = warnings_of(lambda: recompute_layers(nn.Linear(2, 2), asked, CPU))
    checkpointing.configure(None)  # as a script does whose forward recomputes
    return told + warnings_of(lambda: recompute_layers(nn.Linear(2, 2), asked, CPU))


def test_that_nothing_is_recomputed_is_said_once() -> None:
    (told,), silent = run_on_ranks(2, recompute_job)
    assert told.startswith("activation_checkpointing: the model is not one of transformers: recomputed is only")
    assert silent == []


def test_other_ranks_open_and_tell_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = FlopsProfilerSettings(enabled=True, profile_step=0)
    settings = replace(
        monitored(tmp_path),
        wall_clock_breakdown=True,
        steps_per_print=1,
        memory_breakdown=True,
        flops_profiler=asked,
    )
    assert train(settings, 3, rank=1)[0] == []
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_forward_that_fails_ends_its_measuring() -> None:
    settings = replace(PLAIN, wall_clock_breakdown=True, flops_profiler=FlopsProfilerSettings(True, profile_step=0))
    model = nn.Linear(8, 1)
    reports = EngineReports(settings, model, CPU, 0, say=lambda line: None)
    with pytest.raises(RuntimeError), reports.forward(0):
        model(torch.randn(2, 9))
    assert not model._forward_hooks
    with reports.forward(0):
        model(torch.randn(2, 8))
    assert not model._forward_hooks


def engine_job(folder: str) -> tuple[list[float], list[float], dict[str, float], bool, str]:
    """(own loss of each micro-batch, rates after each step, times, whether the monitor is on, what was said)."""
    import contextlib
    import io

    import heavylift

    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": f"{folder}/profile.txt"},
    }
    torch.manual_seed(0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine, *_ = heavylift.initialize(model=nn.Linear(8, 1), config=config)
        losses, rates = [], []
        for step in range(4):
            for _ in range(2):
                loss = engine(torch.randn(4, 8)).square().mean()
                losses.append(loss.item())
                if step % 2:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            rates.append(engine.get_lr()[0])
        found = engine.get_wall_clock_timers()
        is_on = engine.monitor.enabled
        engine.destroy()
    return losses, rates, found, is_on, said.getvalue()


def test_an_engine_reports_while_it_trains(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, engine_job, str(tmp_path))
    losses, rates, times_ms, is_on, said = first
    assert rates == pytest.approx([0, 0.0025, 0.005, 0.0075])
    assert column(tmp_path, "lr") == [(16 * k, pytest.approx(rate)) for k, rate in enumerate(rates, 1)]
    means = [(losses[2 * k] + losses[2 * k + 1]) / 2 for k in range(4)]
    assert column(tmp_path, "train_loss") == [(16 * k, pytest.approx(mean)) for k, mean in enumerate(means, 1)]
    assert is_on and set(times_ms) == {"forward", "backward", "backward_inner", "step"}
    assert [x for x, _ in column(tmp_path, "elapsed_time_ms_step")] == [32, 64]
    lines = [line for line in said.splitlines() if line.startswith("step=")]
    assert [line.split(" | ")[0].split(", ")[0] for line in lines] == ["step=2", "step=2", "step=4", "step=4"]
    assert "skipped=0, lr=[0.0025], mom=[(0.9, 0.999)], grad_norm=" in lines[1]
    text = (tmp_path / "profile.txt").read_text()
    assert "flops profile, step 2" in text and f"forward FLOPs per process                 {2 * 4 * 8} FLOPS" in text
    assert "processes                                 2" in text
    assert (second[2], second[3]) == ({}, False)
    assert "step=" not in second[4]
