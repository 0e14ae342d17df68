"""The whole command on a tiny pretrained model with real data: what it leaves, what it reports, and that it repeats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from conftest import CHATML, Finished

from heavylift.config.schema import TrainConfig
from heavylift.train.metrics import StepMetrics, read_metrics
from heavylift.train.schedules import lr_multiplier

NUM_STEPS = 6
Run = Callable[..., Finished]


def write(folder: Path, name: str, model: Path, data: Path, **sections: dict) -> Path:
    recipe: dict[str, dict] = {
        "model": {"model_name_or_path": str(model)},
        "data": {"dataset": str(data), "val_size": 2},
        "train": {
            "output_dir": str(folder / name),
            "max_steps": NUM_STEPS,
            "learning_rate": 1e-2,
            "warmup_ratio": 0.3,
            "min_lr_ratio": 0.1,
            "per_device_train_batch_size": 2,
            "eval_steps": 4,
        },
        "engine": {"offload_optimizer": "host", "ratio": 0.6},
        "export": {"dtype": "float32"},
        "launch": {"nproc": 2},
    }
    for section, values in sections.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chat_rows: list) -> Path:
    root = tmp_path_factory.mktemp("runs")
    (root / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows))
    return root


@pytest.fixture(scope="module")
def first(folder: Path, tiny_llama_dir: Path, run_heavylift: Run) -> tuple[Path, Finished]:
    """The run folder of one run on two processes."""
    done = run_heavylift("train", write(folder, "first", tiny_llama_dir, folder / "chat.jsonl"))
    assert done.rc == 0, done.stderr
    return folder / "first", done


def losses(run: Path) -> list[float]:
    return [step.loss for step in read_metrics(run / "metrics.jsonl").steps]


def test_the_run_folder_is_complete(first: tuple[Path, Finished]) -> None:
    run, done = first
    assert {path.name for path in run.iterdir()} == {"model", "metrics.jsonl", "waits.jsonl", "loss.png", "config.yaml"}
    assert {path.name for path in (run / "model").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""
    assert str(run / "model") in done.stdout
    shown = [line for line in done.stdout.splitlines() if line.startswith("step: ")]
    assert len([line for line in shown if "eval_loss" not in line]) == NUM_STEPS


def test_metrics_have_exactly_their_keys(first: tuple[Path, Finished]) -> None:
    records = [json.loads(line) for line in (first[0] / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "eval_loss" not in record]
    evals = [record for record in records if "eval_loss" in record]
    assert [list(step) for step in steps] == [[field.name for field in fields(StepMetrics)]] * NUM_STEPS
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert [(list(e), e["step"]) for e in evals] == [(["step", "eval_loss"], step) for step in (0, 4, NUM_STEPS)]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert evals[-1]["eval_loss"] < 0.9 * evals[0]["eval_loss"]
    assert all(step["tokens"] > 0 and step["grad_norm"] > 0 and step["mem_host_gib"] > 0.1 for step in steps)
    # of two processes; an evaluation's are no step's
    assert all(0 < step["collective_wait_s"] < step["step_s"] for step in steps)


def test_learning_rates_are_those_of_the_schedule(first: tuple[Path, Finished]) -> None:
    config = TrainConfig(output_dir="x", learning_rate=1e-2, warmup_ratio=0.3, min_lr_ratio=0.1)
    expected = [1e-2 * lr_multiplier(step, NUM_STEPS, config) for step in range(NUM_STEPS)]
    assert [step.lr for step in read_metrics(first[0] / "metrics.jsonl").steps] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 3


def test_the_written_config_runs_again_to_the_same_bits(
    first: tuple[Path, Finished], folder: Path, run_heavylift: Run
) -> None:
    done = run_heavylift("train", first[0] / "config.yaml", f"train.output_dir={folder / 'again'}")
    assert done.rc == 0, done.stderr
    again, before = (read_metrics(run / "metrics.jsonl") for run in (folder / "again", first[0]))
    assert [(s.loss, s.grad_norm, s.lr, s.tokens) for s in again.steps] == [
        (s.loss, s.grad_norm, s.lr, s.tokens) for s in before.steps
    ]
    assert again.evals == before.evals
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (folder / "again", first[0])]
    assert weights[0] == weights[1]


@pytest.mark.soak
def test_accumulation_equals_processes(first: tuple[Path, Finished], folder: Path, run_heavylift: Run) -> None:
    """One process with two micro-batches sees what two processes see; float32 sums differ in order (seen: 1e-6).

    Its halves are `test_data_batches.py` (the same rows) and `test_gradient_accumulation.py` (the same step).
    """
    overrides = [f"train.output_dir={folder / 'one'}", "launch.nproc=1", "train.gradient_accumulation_steps=2"]
    done = run_heavylift("train", folder / "first.yaml", *overrides, "engine.zero_stage=1")
    assert done.rc == 0, done.stderr
    assert losses(folder / "one") == pytest.approx(losses(first[0]), rel=1e-5)


def test_the_model_opens_in_transformers(
    first: tuple[Path, Finished], tiny_llama_dir: Path, folder: Path, run_heavylift: Run
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, start = (AutoModelForCausalLM.from_pretrained(path) for path in (first[0] / "model", tiny_llama_dir))
    assert model.dtype == torch.float32
    for (name, new), old in zip(model.named_parameters(), start.parameters(), strict=True):
        assert new.shape == old.shape and not torch.equal(new, old), name
    tokenizer = AutoTokenizer.from_pretrained(first[0] / "model")
    assert tokenizer.chat_template == CHATML
    chat = [{"role": "user", "content": "Lamp?"}]
    original = AutoTokenizer.from_pretrained(tiny_llama_dir)
    assert tokenizer.apply_chat_template(chat) == original.apply_chat_template(chat)
    more = {"train": {"max_steps": 1}, "launch": {"nproc": 1}}
    done = run_heavylift("train", write(folder, "next", first[0] / "model", folder / "chat.jsonl", **more))
    assert done.rc == 0, done.stderr
    assert losses(folder / "next")[0] < 0.9 * losses(first[0])[0], "training goes on from the exported weights"
