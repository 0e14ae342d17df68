"""Checks a recipe against the file system before torch is imported: all problems at once, in under a second.

Left out, as they need torch or the tokenizer: parameter names (`model.freeze`), shapes against the config, lengths
in tokens, the size of a model with random weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from heavylift.config.model_folder import (
    check_tokenizer,
    read_config,
    read_weights,
    resolve_model_folder,
    resolve_tokenizer_folder,
)
from heavylift.config.packages import missing_package
from heavylift.config.run_folder import check_output_dir, nearest_parent
from heavylift.config.schema import Recipe
from heavylift.config.words import counted
from heavylift.data.formats import read_rows
from heavylift.errors import UserError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_EXPORT_MARGIN_BYTES = 32_000_000  # tokenizer, headers, metrics, loss.png
T = TypeVar("T")


def check(recipe: Recipe, nproc: int | None = None, owns_output_dir: bool = True) -> int:
    """Number of samples that the recipe reads; raises UserError with every problem found.

    `nproc`: number of processes of the whole run; None if not yet known (call `check_processes` later).
    `owns_output_dir`: False on the ranks of a run started elsewhere that do not write the run folder.
    """
    found = _Problems()
    if owns_output_dir:
        found.of(lambda: check_output_dir(recipe))
    writes_here = owns_output_dir and not found.problems
    folder = found.of(lambda: resolve_model_folder(recipe))
    if folder:
        _check_model(recipe, folder, found, writes_here)
    if recipe.data.format != "random" or recipe.eval.sample_prompt is not None:
        _check_tokenizer(recipe, folder, found)
    found.of(lambda: _check_monitors(recipe))
    num_samples = found.of(lambda: _count_samples(recipe)) or 0
    if num_samples and nproc is not None:
        found.of(lambda: check_processes(recipe, num_samples, nproc))
    if found.problems:
        raise UserError(*dict.fromkeys(found.problems))  # once each: model and tokenizer may share a folder
    return num_samples


def check_processes(recipe: Recipe, num_samples: int, nproc: int) -> None:
    """Raises UserError if there are fewer training samples than processes."""
    val = recipe.data.val_size
    num_val = int(val) if val >= 1 else round(val * num_samples)
    if num_val >= num_samples:
        raise UserError(f"data.val_size: {val} holds out all of {counted(num_samples, 'sample')}; choose a smaller one")
    left = num_samples - num_val
    if nproc > left:
        samples = counted(left, "training sample")
        raise UserError(f"launch.nproc: {nproc} processes, but {samples}; use fewer or add data")


class _Problems:
    """Runs checks and gathers what they raise."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def of(self, action: Callable[[], T]) -> T | None:
        """The result of `action`, None if it raised UserError."""
        try:
            return action()
        except UserError as error:
            self.problems += error.problems
            return None


def _check_model(recipe: Recipe, folder: Path, found: _Problems, writes_here: bool) -> None:
    config = found.of(lambda: read_config(folder, "model.model_name_or_path"))
    if config:
        found.of(lambda: _check_length(recipe, config, folder))
    if recipe.model.init == "pretrained":
        weights = found.of(lambda: read_weights(folder))
        if weights and writes_here:
            found.of(lambda: check_disk(recipe, weights.num_params))


def _check_length(recipe: Recipe, config: dict[str, Any], folder: Path) -> None:
    allowed, asked = config.get("max_position_embeddings"), recipe.data.cutoff_len
    if isinstance(allowed, int) and asked is not None and asked > allowed:
        raise UserError(
            f"data.cutoff_len: {asked} tokens are more than the model allows "
            f"(max_position_embeddings {allowed} in {folder / 'config.json'}); choose at most {allowed}"
        )


def model_folder_bytes(recipe: Recipe, num_params: int) -> int:
    """What the trained model takes on the disk, and some more."""
    return num_params * _DTYPE_BYTES[recipe.export.dtype] + _EXPORT_MARGIN_BYTES


def check_disk(recipe: Recipe, num_params: int) -> None:
    """Raises UserError when the model folder of `num_params` parameters will not fit the disk."""
    if not recipe.export.save:
        return
    needed = model_folder_bytes(recipe, num_params)
    parent = nearest_parent(recipe.output_dir)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"{recipe.output_dir}: the trained model takes {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free on "
            f"{parent}; free the disk or choose another train.output_dir"
        )


def _check_monitors(recipe: Recipe) -> None:
    missing = {kind: missing_package(kind) for kind in recipe.train.report_to}
    problems = [
        f"train.report_to: {kind} needs the package {package}, which is not installed; pip install {package}, or "
        "take it out"
        for kind, package in missing.items()
        if package is not None
    ]
    if problems:
        raise UserError(*problems)


def _check_tokenizer(recipe: Recipe, model_folder: Path | None, found: _Problems) -> None:
    own = recipe.model.tokenizer_name_or_path
    folder = found.of(lambda: resolve_tokenizer_folder(recipe)) if own else model_folder
    template = recipe.data.chat_template
    if folder:
        needs_template = template is None and recipe.data.format != "random"
        found.of(lambda: check_tokenizer(folder, "model.tokenizer_name_or_path", needs_template))
    if template is not None and not Path(template).is_file():
        found.problems.append(f"{template}: expected a file with a Jinja chat template; change data.chat_template")


def _count_samples(recipe: Recipe) -> int:
    if recipe.data.format == "random":
        assert recipe.data.num_samples is not None, recipe.data  # the schema demands it
        return recipe.data.num_samples
    num_rows = len(read_rows([Path(file) for file in recipe.data.files], recipe.data.format))
    return min(num_rows, recipe.data.num_samples or num_rows)
