"""`heavylift train` as a whole with a tiny model: answers before and after, overwriting, torchrun, user errors late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from conftest import Finished, command_env

from heavylift.config.recipe import load_recipe

Run = Callable[..., Finished]
Write = Callable[..., Path]


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_train_then_again_over_it(run_heavylift: Run, write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    recipe = write_recipe(eval={"sample_prompt": "Boil an egg?", "sample_max_new_tokens": 5}, launch={"nproc": "auto"})
    first = run_heavylift("train", recipe, "--nproc", "2", env=env)
    assert first.rc == 0, first.stderr
    run = tmp_path / "run"
    assert {"model", "metrics.jsonl", "config.yaml"} <= written(run)
    lines = first.stdout.splitlines()
    [question] = [number for number, line in enumerate(lines) if line == "question: Boil an egg?"]
    assert lines[question + 1].startswith("before: ") and any(line.startswith("after: ") for line in lines[question:])
    # the two commands at the end are there to be pasted
    generate, again = (line.split() for line in lines[-2:])
    assert generate[:3] == ["heavylift", "generate", str(run / "model")]
    assert again[:3] == ["heavylift", "train", str(run / "config.yaml")]
    resolved = load_recipe(run / "config.yaml")
    assert resolved.launch.nproc == 2 and resolved.train.max_steps == 2
    load_recipe(again[2], again[3:])

    refused = run_heavylift("train", recipe)
    assert refused.rc == 2 and "overwrite_output_dir=true" in refused.errors[0]
    overrides = ["train.overwrite_output_dir=true", "train.max_steps=1", "eval.sample_prompt=null"]
    second = run_heavylift("train", recipe, *overrides, "--nproc", "1", env=env)
    assert second.rc == 0, second.stderr
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["max_steps"] == 1
    # neither temporary files nor the older run stay behind
    assert written(tmp_path) == {"run", "tmp", "recipe.yaml", "chat.jsonl"}
    left = {name for name in written(tmp_path / "tmp") if name.startswith(("heavylift", "torchelastic"))}
    assert left == set()


def test_user_error_in_the_workers_leaves_everything_as_it_was(
    run_heavylift: Run, write_recipe: Write, tmp_path: Path
) -> None:
    recipe = write_recipe(model={"freeze": ["no.such.parameter"]}, train={"overwrite_output_dir": True})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: {}\ndata: {}\ntrain: {}\n")
    done = run_heavylift("train", recipe)
    assert done.rc == 2, done
    assert len(done.errors) == 1 and "no.such.parameter" in done.errors[0]
    assert "Traceback" not in done.stderr
    assert written(tmp_path / "run") == {"config.yaml"}
    assert written(tmp_path) == {"run", "recipe.yaml", "chat.jsonl"}


def test_under_torchrun(write_recipe: Write, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "heavylift", "train", str(write_recipe())]
    done = subprocess.run(command, env=command_env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"model", "metrics.jsonl", "config.yaml"} <= written(tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "config.yaml").launch.nproc == 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2

    again = subprocess.run(command, env=command_env(), capture_output=True, text=True, timeout=300)
    said = [line for line in again.stderr.splitlines() if line.startswith("error: ")]
    assert again.returncode != 0 and len(said) == 1 and "exists" in said[0], again.stderr


def test_layers_that_cannot_be_compiled_are_one_line(run_heavylift: Run, write_recipe: Write) -> None:
    """A machine without a compiler stands for it: what it cannot do looks like what a layer cannot."""
    recipe = write_recipe(train={"compile": True}, launch={"nproc": 2})
    done = run_heavylift("train", recipe, env={"CXX": "/no/such/compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})
    [line] = done.errors
    assert done.rc == 2 and "Traceback" not in done.stderr
    assert line.startswith("train.compile: the model's layers cannot be compiled here: ")
    assert line.endswith("; set it to false")
