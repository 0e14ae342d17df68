"""The run folder before training: may it be made, and what happens to an older one of the same name.

An older run is moved aside, not deleted, until the new one has trained its first step: a run that stops on a user
error leaves everything as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

import yaml

from heavylift.config.schema import Recipe
from heavylift.errors import UserError

_HOW = "choose another train.output_dir"
RUN_FILES = frozenset(
    (
        *("model", "model.partial", "config.yaml", "metrics.jsonl", "waits.jsonl", "loss.png", "trace.json"),
        *("tensorboard", "csv", "wandb"),
    )
)
"""Everything that a run writes into its folder."""


def is_run_folder(folder: Path) -> bool:
    """Whether heavylift wrote this folder: its config.yaml is a recipe. Nothing else is ever deleted."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(config, dict) and {"model", "data", "train"} <= set(config)


def has_trained(folder: Path) -> bool:
    """Whether metrics.jsonl holds at least one training step."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return any("loss" in json.loads(line) for line in lines if line.strip())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # unreadable: rather keep it than lose a run


def check_output_dir(recipe: Recipe) -> None:
    """Raises UserError if the run folder exists (and may not be replaced) or cannot be made."""
    folder = recipe.output_dir
    try:
        folder.exists()
    except OSError as error:  # a name too long, a loop of links
        raise UserError(f"{str(folder)[:80]}: cannot be made: {error.strerror}; {_HOW}") from None
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder}: expected a folder or nothing, got a file or link; {_HOW}")
    if folder.is_dir() and any(folder.iterdir()):
        if not recipe.train.overwrite_output_dir:
            raise UserError(f"{folder}: exists; {_HOW} or set train.overwrite_output_dir=true")
        if not is_run_folder(folder):
            raise UserError(f"{folder}: exists and is no heavylift run folder, so it is not overwritten; {_HOW}")
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in RUN_FILES)
        if foreign:
            raise UserError(
                f"{folder}: holds {', '.join(foreign[:3])}, which heavylift did not write, so it is not overwritten; "
                f"move that elsewhere, or {_HOW}"
            )
        _check_inputs_outside(recipe, folder.resolve())
    parent = nearest_parent(folder)
    if not parent.is_dir():
        raise UserError(f"{folder}: cannot be made, {parent} is a file; {_HOW}")
    try:
        # really tried: permission bits say nothing to root, nor about read-only file systems
        with tempfile.TemporaryDirectory(prefix=".heavylift-", dir=parent):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be made, {parent} is not writable ({error.strerror}); {_HOW}") from None


def nearest_parent(folder: Path) -> Path:
    """The closest ancestor of `folder` that exists."""
    return next(parent for parent in folder.absolute().parents if parent.exists())


def _check_inputs_outside(recipe: Recipe, folder: Path) -> None:
    model = recipe.model
    inputs = {
        "model.model_name_or_path": (model.model_name_or_path,),
        "model.tokenizer_name_or_path": (model.tokenizer_name_or_path,),
        "data.dataset": recipe.data.files,
        "data.chat_template": (recipe.data.chat_template,),
    }
    problems = [
        f"{path}: lies in the run folder that would be overwritten; change {key} or {_HOW}"
        for key, paths in inputs.items()
        for path in paths
        if path and Path(path).resolve().is_relative_to(folder)
    ]
    if problems:
        raise UserError(*problems)


class RunFolder:
    """Makes room for a new run and cleans up after one that stopped early. Use from one process only.

    `make_room` moves an older run aside. `settle` ends it: a run without a first step that stopped on a user error
    is removed and the older one put back; else the older one is deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._existed_empty = folder.is_dir() and not any(folder.iterdir())
        self._aside = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
        self._lock_path = folder.with_name(f".{folder.name}.lock")
        self._lock: int | None = None

    def make_room(self) -> None:
        """Move an older run aside (same file system, so this is one rename).

        Raises UserError while another run is at work in the folder.
        """
        self._take_lock()
        if self._folder.is_dir() and not self._existed_empty:
            assert is_run_folder(self._folder), self._folder  # checked by check_output_dir
            self._folder.rename(self._aside)

    def settle(self, user_error: bool) -> None:
        """Call once the run is over, whatever its end."""
        try:
            self._settle(user_error)
        finally:
            if self._lock is not None:
                self._lock_path.unlink(missing_ok=True)
                os.close(self._lock)
                self._lock = None

    def _take_lock(self) -> None:
        self._lock_path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # the kernel lets go of it when this process ends, however it ends
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 20).decode(errors="replace") or "unknown"
            os.close(self._lock)
            self._lock = None
            raise UserError(f"{self._folder}: another run is at work there (process {owner}); {_HOW}") from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def _settle(self, user_error: bool) -> None:
        started = has_trained(self._folder)
        if not started and (user_error or not self._folder.exists()):
            if self._folder.exists():
                shutil.rmtree(self._folder)
            if self._aside.exists():
                self._aside.rename(self._folder)
            elif self._existed_empty:
                self._folder.mkdir()
        elif self._aside.exists():
            shutil.rmtree(self._aside)
