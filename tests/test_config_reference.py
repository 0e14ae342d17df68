"""The config reference says what the schema says, and a new key is a conscious act."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from heavylift.config.reference import main, plain_type, render, sections
from heavylift.config.schema import Int

ROOT = Path(__file__).parents[1]

# A key that is added, renamed or removed must be changed here too: people's recipes depend on these names.
RECIPE_KEYS = """
model.model_name_or_path model.init model.tokenizer_name_or_path model.dtype model.attn_implementation
model.trust_remote_code model.freeze
data.dataset data.format data.chat_template data.cutoff_len data.overlong data.train_on_inputs data.val_size
data.num_samples
train.output_dir train.overwrite_output_dir train.seed train.per_device_train_batch_size
train.per_device_eval_batch_size train.gradient_accumulation_steps train.num_train_epochs train.max_steps
train.learning_rate train.lr_scheduler_type train.warmup_ratio train.warmup_steps train.min_lr_ratio
train.wsd_decay_ratio train.weight_decay train.adam_beta1 train.adam_beta2 train.adam_epsilon train.max_grad_norm
train.gradient_checkpointing train.checkpoint_every train.cpu_checkpointing train.loss_chunk_tokens
train.compile train.logging_steps train.report_to train.run_name train.eval_steps train.profile
engine.zero_stage engine.offload_optimizer engine.ratio engine.schedule engine.state_format engine.gradients_on
engine.streamed_share engine.cpu_threads engine.native_kernel
eval.sample_prompt eval.sample_max_new_tokens
export.save export.dtype export.max_shard_size
launch.nproc
""".split()


def recipe_keys() -> list[str]:
    """Every key of a recipe as `section.key`, in order."""
    return [f"{name}.{key}" for name, kind in sections().items() for key in kind.model_fields]


def test_recipe_keys_are_frozen() -> None:
    assert sorted(recipe_keys()) == sorted(RECIPE_KEYS)


def test_committed_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert committed == render(), "run python -m heavylift.config.reference"


def _rows() -> list[list[str]]:
    lines = [line for line in render().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


def test_every_key_has_one_row_with_a_meaning() -> None:
    rows = _rows()
    assert [row[0].strip("`") for row in rows] == [key.split(".")[1] for key in recipe_keys()]
    assert all(len(row) == 4 and all(row) for row in rows)


def test_rows_tell_type_and_default() -> None:
    rows = {row[0]: row[1:3] for row in _rows()}
    assert rows["`model_name_or_path`"] == ["text", "required"]
    assert rows["`lr_scheduler_type`"] == ["`cosine`, `linear`, `constant` or `wsd`", "`cosine`"]
    assert rows["`adam_beta1`"] == ["number from 0 below 1", "`0.9`"]
    assert rows["`offload_optimizer`"] == ["`device` or `host`", "`device`"]
    assert rows["`max_steps`"] == ["whole number from 1 or `null`", "`null`"]
    assert rows["`freeze`"] == ["list of texts", "`[]`"]
    assert rows["`compile`"] == ["`auto`, `true` or `false`", "`auto`"]


class _Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Int, "whole number"),
        (Annotated[Int, Field(gt=0, le=9)] | Literal["auto"], "whole number above 0 up to 9 or `auto`"),
        (str | tuple[str, ...] | None, "text, list of texts or `null`"),
        (_Colour, "`red`"),
    ],
)
def test_types_in_plain_words(annotation: Any, words: str) -> None:
    assert plain_type(annotation) == words


def test_type_without_words_is_refused() -> None:
    with pytest.raises(TypeError, match="no words for the type"):
        plain_type(dict[str, int])


def test_command_writes_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "config.md"
    command = [sys.executable, "-m", "heavylift.config.reference"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)

    missing = run("--check", str(path))
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "out of date" in missing.stderr
    assert run(str(path)).returncode == 0
    assert path.read_text(encoding="utf-8") == render()
    assert run("--check", str(path)).returncode == 0
    path.write_text(render().replace("cosine", "sine"), encoding="utf-8")
    assert run("--check", str(path)).returncode == 1


def test_command_reports_a_missing_folder_and_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere" / "config.md")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["--chekc"]) == 2
    assert "usage" in capsys.readouterr().err
