"""`train.report_to`: the curves of `heavylift train` are those of metrics.jsonl, and mistakes are told early."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Finished
from wandb_files import wandb_history

from heavylift.config.recipe import dump_recipe, load_recipe
from heavylift.errors import UserError
from heavylift.train.metrics import read_metrics
from heavylift.train.monitors import recipe_monitors
from heavylift.train.preflight import check

Run = Callable[..., Finished]
Write = Callable[..., Path]
NUM_STEPS = 3


def column(run: Path, name: str) -> list[tuple[int, float]]:
    with open(run / "csv" / name, newline="") as file:
        return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]


def test_a_run_writes_its_curves(write_recipe: Write, run_heavylift: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kinds = ["csv", *(kind for kind in ("tensorboard", "wandb") if find_spec(kind) is not None)]
    recipe = write_recipe(
        train={"output_dir": str(run), "max_steps": NUM_STEPS, "report_to": kinds, "run_name": "first try"},
        data={"val_size": 2},
        export={"save": False},
        launch={"nproc": 1},
    )
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = run_heavylift("train", recipe, env=env)
    assert done.rc == 0, done.stderr
    metrics = read_metrics(run / "metrics.jsonl")
    assert column(run, "train_loss.csv") == [(step.step, step.loss) for step in metrics.steps]
    assert column(run, "train_grad_norm.csv") == [(step.step, step.grad_norm) for step in metrics.steps]
    assert column(run, "train_learning_rate.csv") == [(step.step, step.lr) for step in metrics.steps]
    assert column(run, "perf_tflops.csv") == [(step.step, step.tflops) for step in metrics.steps]
    assert column(run, "perf_tokens_per_sec.csv") == [(step.step, step.tokens_per_s) for step in metrics.steps]
    assert column(run, "eval_loss.csv") == [(found.step, found.eval_loss) for found in metrics.evals]
    assert [step for step, _ in column(run, "train_loss.csv")] == [1, 2, 3]
    if "tensorboard" in kinds:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(run / "tensorboard"))
        board.Reload()
        found = [(event.step, event.value) for event in board.Scalars("train/loss")]
        assert found == [(step.step, pytest.approx(step.loss, rel=1e-6)) for step in metrics.steps]
    if "wandb" in kinds:
        rows = [row for row in wandb_history(run) if "train/loss" in row]
        assert [(row["_step"], row["train/loss"]) for row in rows] == column(run, "train_loss.csv")
    # the folders belong to the run: it may be replaced
    assert check(load_recipe(recipe, ["train.overwrite_output_dir=true"]), nproc=1) > 0


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("csv", ("csv",)),
        ("none", ()),
        ("null", ()),
        ("[csv, tensorboard]", ("csv", "tensorboard")),
        ("[]", ()),
    ],
)
def test_ways_to_write_report_to(write_recipe: Write, given: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(), [f"train.report_to={given}"])
    assert recipe.train.report_to == kinds
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize("given", ["wandbb", "[csv, all]", "3", "[[csv]]", "yes"])
def test_unknown_monitors_are_told(write_recipe: Write, given: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write_recipe(), [f"train.report_to={given}"])
    (problem,) = caught.value.problems
    assert "train.report_to: expected a list of tensorboard, wandb, csv, comet, got" in problem


def test_a_missing_package_is_told_before_training(write_recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    absent, real = ("wandb", "comet_ml"), importlib.util.find_spec
    monkeypatch.setattr("heavylift.config.packages.find_spec", lambda name: None if name in absent else real(name))
    with pytest.raises(UserError) as caught:
        check(load_recipe(write_recipe(), ["train.report_to=[csv, wandb, comet]"]), nproc=1)
    assert caught.value.problems == tuple(
        f"train.report_to: {kind} needs the package {package}, which is not installed; pip install {package}, "
        "or take it out"
        for kind, package in (("wandb", "wandb"), ("comet", "comet_ml"))
    )


def test_names_of_run_and_project(write_recipe: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    overrides = [f"train.output_dir={tmp_path}/runs/seven", "train.report_to=[wandb, comet]"]
    wandb, comet = recipe_monitors(load_recipe(write_recipe(), overrides))
    assert (wandb.options["project"], wandb.options["name"]) == ("heavylift", "seven")
    assert comet.options["experiment_name"] == "seven"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (wandb,) = recipe_monitors(load_recipe(write_recipe(), [*overrides, "train.report_to=wandb", "train.run_name=x"]))
    assert (wandb.options["project"], wandb.options["name"]) == ("mine", "x")
