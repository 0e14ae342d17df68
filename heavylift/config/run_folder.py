"""The run folder before training: may it be made, and what happens to an older one of the same name.

An older run is moved aside, not deleted, until the new one has trained its first step: a run that stops before that
leaves the older one as it was; after a kill the next run puts it back.
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
        *(".loss.png.part", "trace.json.tmp"),
    )
)
"""Everything that a run writes into its folder, what one that is killed leaves half-written too."""


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
        aside_of(folder).exists()  # the longest of the names
        put_back_left_over(folder)
    except OSError as error:  # a name too long, a loop of links
        raise UserError(f"{str(folder)[:80]}: cannot be made: {error.strerror}; {_HOW}") from None
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder}: expected a folder or nothing, got a file or link; {_HOW}")
    if folder.is_dir() and any(folder.iterdir()):
        if not recipe.train.overwrite_output_dir:
            raise UserError(f"{folder}: exists; {_HOW} or set train.overwrite_output_dir=true")
        if not is_run_folder(folder):
            raise UserError(f"{folder}: exists and is no heavylift run folder, so it is not overwritten; {_HOW}")
        foreign = _foreign_names(folder)
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


def _foreign_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in RUN_FILES)


def aside_of(folder: Path) -> Path:
    """Where this process moves an older run of the folder."""
    return folder.with_name(f".{folder.name}.replaced-{os.getpid()}")


def put_back_left_over(folder: Path) -> None:
    """Puts an older run back that a killed one had moved aside, or removes it where the killed one had trained.

    Nothing while a run is at work there, and where the folder is somebody else's. Raises OSError.
    """
    start = f".{folder.name}.replaced-"
    if not folder.parent.is_dir() or folder.is_symlink():
        return
    left_over = [path for path in folder.parent.iterdir() if path.name.startswith(start) and is_run_folder(path)]
    lock = _Lock(folder)
    if not left_over or lock.take() is not None:
        return
    try:
        for aside in sorted(left_over, key=lambda path: path.stat().st_mtime, reverse=True):
            if not folder.exists() or not any(folder.iterdir()):
                os.replace(aside, folder)
            elif is_run_folder(folder) and has_trained(folder):
                shutil.rmtree(aside)
            elif is_run_folder(folder) and not _foreign_names(folder):
                shutil.rmtree(folder)
                os.replace(aside, folder)
    finally:
        lock.release()


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


class _Lock:
    """Held by the run that is at work in a folder. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(f".{folder.name}.lock")
        self._opened: int | None = None

    def take(self) -> str | None:
        """The process that has it; None where it has been taken. On a file system without locks it always is."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            opened = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(opened, 20).decode(errors="replace") or "unknown"
                os.close(opened)
                return owner
            except OSError:
                pass
            if self._is_there(opened):
                break
            os.close(opened)  # who had it has removed it since it was opened: the next one would lock another file
        self._opened = opened
        os.ftruncate(opened, 0)
        os.write(opened, str(os.getpid()).encode())
        return None

    def _is_there(self, opened: int) -> bool:
        try:
            return os.path.samestat(os.fstat(opened), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Lets go of it, if it was taken."""
        if self._opened is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._opened)
            self._opened = None


class RunFolder:
    """Makes room for a new run and cleans up after one that stopped early. Use from one process only.

    `make_room` moves an older run aside. `settle` ends it: where the new one has trained a step the older one is
    deleted, else it is put back; of a run without a first step that stopped on a user error nothing is left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._existed_empty = folder.is_dir() and not any(folder.iterdir())
        self._aside = aside_of(folder)
        self._lock = _Lock(folder)

    def make_room(self) -> None:
        """Move an older run aside (same file system, so this is one rename).

        Raises UserError while another run is at work in the folder, and where the disk refuses.
        """
        try:
            owner = self._lock.take()
        except OSError as error:
            self._lock.release()
            raise UserError(f"{self._folder}: cannot be made: {error.strerror}; free the disk or {_HOW}") from None
        if owner is not None:
            raise UserError(f"{self._folder}: another run is at work there (process {owner}); {_HOW}")
        if self._folder.is_dir() and not self._existed_empty:
            assert is_run_folder(self._folder), self._folder  # checked by check_output_dir
            self._folder.rename(self._aside)

    def settle(self, user_error: bool) -> None:
        """Call once the run is over, whatever its end."""
        try:
            self._settle(user_error)
        finally:
            self._lock.release()

    def _settle(self, user_error: bool) -> None:
        if has_trained(self._folder):
            if self._aside.exists():
                shutil.rmtree(self._aside)
        elif self._aside.exists() or user_error or not self._folder.exists():
            if self._folder.exists():
                shutil.rmtree(self._folder)
            if self._aside.exists():
                self._aside.rename(self._folder)
            elif self._existed_empty:
                self._folder.mkdir()
