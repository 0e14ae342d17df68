"""Files of a training checkpoint, through torch.distributed.checkpoint: saved and loaded by any number of ranks.

    DIR/latest                 the tag saved last
    DIR/TAG/.metadata, *.distcp   tensors: `model.NAME`, `master.NAME`, `exp_avg.NAME`, ... by parameter name
    DIR/TAG/training.json      counters, loss scale, steps taken by each parameter
    DIR/TAG/extras.pt          client state, scheduler, parameter groups (loads with `weights_only`)

A checkpoint is complete or not there, and one that is saved again is always there (`heavylift.api.checkpoint_folders`).
Left out: what goes into it (`heavylift.api.engine_checkpoint`, `heavylift.api.checkpoint_extras`).
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from heavylift.api import checkpoint_folders, checkpoint_writer
from heavylift.api.checkpoint_damage import find_cut, find_damaged, short_reason
from heavylift.api.checkpoint_folders import EXTRAS, TRAINING
from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.files import replacing

T = TypeVar("T")
Saved = torch.Tensor | checkpoint_writer.Later
LATEST = "latest"
FORMAT = 1
"""Of the files above; raised when an old reader would misread them."""
ARRIVAL_TIMEOUT = timedelta(minutes=10)
"""For the slowest rank to come to a call that saves after the first."""


def on_first_rank(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0; what it returned there, on every rank. A collective.

    An OSError or UserError there becomes a UserError on every rank; any other exception, a defect or one of the user's
    own code, is raised as it is, and RuntimeError on the other ranks, which so do not wait for rank 0.
    """
    failure: Exception | None = None
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            failure = error
            outcome[1] = _outcome_of(error)
    dist.broadcast_object_list(outcome, src=0)
    _raise_outcome(0, outcome[1], failure)
    return outcome[0]


def _outcome_of(error: Exception) -> tuple[bool, str]:
    """Whether the user can mend it, and what to say on other ranks."""
    if isinstance(error, UserError):
        return True, str(error)
    if isinstance(error, OSError):
        what = f"{error.filename or 'checkpoint'}: {error.strerror or error}"
        return True, f"checkpoint: {what}; free space, or choose another folder"
    return False, f"{type(error).__name__}: {short_reason(error)}"


def _raise_outcome(rank: int, outcome: tuple[bool, str] | None, own: Exception | None) -> None:
    if outcome is None:
        return
    can_be_mended, text = outcome
    if can_be_mended:
        raise UserError(text) from None
    if own is not None:
        raise own
    raise RuntimeError(f"rank {rank} has failed: {text}")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write weights to, by `torch.save` or safetensors: `heavylift.files.replacing`.

    Raises UserError for a disk that refuses, and leaves `path` as it was.
    """
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    except (RuntimeError, SafetensorError) as error:  # theirs, which say what the system has said
        raise _refused(path, short_reason(error)) from None


def _refused(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: cannot be written: {reason}; free space, or choose another folder")


def await_all_ranks(call: str, group: dist.ProcessGroup, longest: timedelta) -> None:
    """Raises UserError, instead of waiting for ever, when a rank does not make the same call.

    `group`: gloo's, all ranks. Waits for `longest`, or for the timeout of the default group where that is shorter.
    """
    timeout = min(longest, _group_timeout(group, longest), _group_timeout(dist.group.WORLD, longest))
    began = time.monotonic()
    try:
        dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
    except RuntimeError:
        waited_s = time.monotonic() - began
        # gloo says the same of a rank that is late and of one that is gone: only the late one takes all the time
        if waited_s < _SHARE_OF_TIMEOUT * timeout.total_seconds():
            raise UserError(
                f"{call}: a rank has left, {waited_s:.0f} s after this one has called it; look for its own error, and "
                "see that all ranks make this call, not rank 0 alone"
            ) from None
        raise UserError(
            f"{call}: not every rank has called it within {waited_s:.0f} s; it is a collective: call it on all ranks, "
            "not on rank 0 alone"
        ) from None


_SHARE_OF_TIMEOUT = 0.95


def _group_timeout(group: dist.ProcessGroup | None, longest: timedelta) -> timedelta:
    assert group is not None, "torch.distributed is not initialised"
    try:
        return group._get_backend(torch.device("cpu")).options._timeout  # torch has no public getter
    except RuntimeError:  # this group reaches no CPU
        return longest


def same_on_all_ranks(call: str, what: str, value: str) -> None:
    """Raises UserError where ranks disagree. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise UserError(f"{call}: {what} should be the same on all ranks, got {sorted(set(values))}")


def write(folder: Path, tag: str, tensors: Mapping[str, Saved], training: dict[str, Any], extras: bytes) -> Path:
    """Writes the checkpoint DIR/TAG; returns that path. A collective.

    Raises UserError for a full or read-only disk, and for a folder that is not the same one for all ranks.
    """

    saving = checkpoint_folders.saving_place(folder, tag)

    def finish() -> None:
        if (lack := find_cut(saving)) is not None:  # before an older one goes
            raise UserError(f"save_checkpoint: {lack} for rank 0; save to a folder that all ranks share")
        text = json.dumps({"format": FORMAT, **training}, indent=1)
        checkpoint_folders.finish(folder, tag, text, extras)

    on_first_rank(lambda: checkpoint_folders.begin(folder, tag))
    try:
        checkpoint_writer.save(saving, tensors)
        on_first_rank(finish)
    except dcp.api.CheckpointException as error:
        checkpoint_folders.abandon(folder, tag)
        raise UserError(f"checkpoint: {folder / tag} cannot be written: {_cause(error)}; free space") from None
    except UserError:
        checkpoint_folders.abandon(folder, tag)
        raise
    return folder / tag


def write_latest(folder: Path, tag: str) -> None:
    """Makes `tag` the one that is loaded by default. A collective."""

    def action() -> None:
        with replacing(folder / LATEST) as part:
            part.write_text(tag, encoding="utf-8")

    on_first_rank(action)


def as_folder(call: str, value: Any) -> Path:
    """`value` as a path. Raises UserError for something that is none."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{call}: expected the path of a folder, got {shown(value)}")
    return Path(value)


def check_tag(call: str, tag: Any) -> str:
    """`tag` as text: a name, or a relative path that stays inside of the folder. Raises UserError for others."""
    text = str(tag)
    path = PurePath(text)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in text or text != text.strip():
        raise UserError(
            f"{call}: tag={shown(tag)}: a tag names a folder inside of the one that is given; use a name such as "
            "global_step100"
        )
    if any(checkpoint_folders.is_left_over(part) for part in path.parts):
        raise UserError(f"{call}: tag={shown(tag)} is the name of a folder that is being written; use another")
    if text == LATEST:
        raise UserError(f"{call}: tag={shown(tag)} is the name of the file that holds the latest tag; use another")
    return text


def find(folder: Path, tag: Any, call: str = "load_checkpoint") -> Path | None:
    """The checkpoint to load: of `tag`, else the latest. None where nothing was saved yet and no tag is asked for.

    Raises UserError for a tag that is none or not there, a damaged `latest`, and another program's checkpoint.
    """
    if tag is None:
        tag = read_latest(folder)
        if tag is None:
            return None
    tag = check_tag(call, tag)
    found = checkpoint_folders.locate(folder, tag)
    if found is not None:
        return found
    path = folder / tag
    if list(path.glob("*model_states.pt")):
        raise UserError(
            f"{path} was written by DeepSpeed; convert it with its own zero_to_fp32.py and load the "
            "weights into the model before initialize()"
        )
    there = checkpoint_folders.tags_in(folder)
    raise UserError(
        f"{path} is no checkpoint; " + (f"these are there: {', '.join(there)}" if there else "none is in this folder")
    )


def read_latest(folder: Path) -> str | None:
    """The tag saved last. None where nothing was saved yet. Raises UserError for a damaged file."""
    if not (folder / LATEST).is_file():
        return None
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        return check_tag(LATEST, tag)
    except (OSError, ValueError):  # a UnicodeDecodeError and a UserError are ValueErrors
        raise UserError(
            f"{folder / LATEST} is damaged: expected the name of a checkpoint in it; give a tag yourself"
        ) from None


def read_training(path: Path) -> dict[str, Any]:
    """The counters. Raises UserError for a newer format or a damaged file."""
    try:
        training = json.loads((path / TRAINING).read_text(encoding="utf-8"))
        version = int(training["format"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path / TRAINING} is damaged; load another tag") from None
    if version > FORMAT:
        raise UserError(f"{path} has format {version}, this version reads up to {FORMAT}; update it")
    return training


def read_extras(path: Path) -> dict[str, Any]:
    """Client state, scheduler and parameter groups, tensors on the CPU. Raises UserError for a damaged file."""
    try:
        return torch.load(path / EXTRAS, map_location="cpu", weights_only=True)
    except Exception as error:  # what a flipped bit does to a pickle is not foreseen
        raise UserError(f"{path / EXTRAS} is damaged ({short_reason(error)}); load another tag") from None


def read_shapes(path: Path) -> dict[str, TensorStorageMetadata]:
    """Key -> what is known of the saved tensor, `size` and `properties.dtype`. Raises UserError for a damaged one."""
    try:
        metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        return {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    except Exception:  # as above
        raise UserError(f"{path / '.metadata'} is missing or damaged; load another tag") from None


def read_tensors(path: Path, tensors: dict[str, Any], *, alone: bool = False) -> None:
    """Fills `tensors` (flat keys, DTensors or plain) from the checkpoint. Raises UserError for damaged files.

    A collective, unless `alone`: then this process reads for itself.
    """
    if not tensors:
        return
    try:
        with warnings.catch_warnings():
            # that this is one process is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=alone)
    except dcp.api.CheckpointException as error:
        reason = find_damaged(path) or f"{path} cannot be read: {_cause(error)}"
        raise UserError(f"{reason}; load another tag") from None


def _cause(error: dcp.api.CheckpointException) -> str:
    return short_reason(next(iter(error.failures.values()), (error, None))[0])
