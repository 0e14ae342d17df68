"""Files of a training checkpoint, through torch.distributed.checkpoint: saved and loaded by any number of ranks.

    DIR/latest                 the tag saved last
    DIR/TAG/.metadata, *.distcp   tensors: `model.NAME`, `master.NAME`, `exp_avg.NAME`, ... by parameter name
    DIR/TAG/training.json      counters, loss scale, steps taken by each parameter
    DIR/TAG/extras.pt          client state, scheduler, parameter groups (loads with `weights_only`)

A checkpoint is complete or not there: it is written beside its place and moved. Left out: what goes into it
(`heavylift.api.engine_checkpoint`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from heavylift.errors import UserError

LATEST = "latest"
TRAINING = "training.json"
EXTRAS = "extras.pt"
FORMAT = 1
"""Of the files above; raised when an old reader would misread them."""


def on_first_rank(action: Callable[[], None]) -> None:
    """Runs `action` on rank 0. A collective; an OSError there becomes a UserError on every rank."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome[0] = f"{error.filename or 'checkpoint'}: {error.strerror or error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise UserError(f"checkpoint: {outcome[0]}; free space, or choose another folder")


def await_all_ranks(call: str, group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Raises UserError, instead of waiting for ever, when a rank does not make the same call. `group`: gloo's."""
    try:
        dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
    except RuntimeError:
        raise UserError(
            f"{call}: not every rank has called it within {timeout.total_seconds():.0f} s; it is a collective: call it "
            "on all ranks, not on rank 0 alone"
        ) from None


def same_on_all_ranks(what: str, value: str) -> None:
    """Raises UserError where ranks disagree. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise UserError(f"save_checkpoint: {what} should be the same on all ranks, got {sorted(set(values))}")


def pack_extras(extras: Mapping[str, Any]) -> bytes:
    """As torch.save writes it. Raises UserError for what could not be loaded again without running code."""
    for key, value in extras.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(
                f"save_checkpoint: {key} holds something else than numbers, text, tensors, lists and dictionaries: "
                f"{reason}"
            ) from None
    buffer = io.BytesIO()
    torch.save(dict(extras), buffer)
    return buffer.getvalue()


def write(folder: Path, tag: str, tensors: dict[str, Any], training: dict[str, Any], extras: bytes) -> Path:
    """Writes the checkpoint DIR/TAG; returns that path. A collective. Raises UserError for a full or read-only disk."""
    target = folder / tag
    partial = target.with_name(f".{target.name}.saving")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        (partial / TRAINING).write_text(json.dumps({"format": FORMAT, **training}, indent=1), encoding="utf-8")
        (partial / EXTRAS).write_bytes(extras)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)

    on_first_rank(begin)
    _dcp(lambda: dcp.save(tensors, checkpoint_id=partial), f"{partial}: cannot be written")
    on_first_rank(finish)
    return target


def write_latest(folder: Path, tag: str) -> None:
    """Makes `tag` the one that is loaded by default. A collective."""

    def action() -> None:
        partial = folder / f".{LATEST}.saving"
        partial.write_text(tag, encoding="utf-8")
        os.replace(partial, folder / LATEST)

    on_first_rank(action)


def find(folder: Path, tag: str | None) -> Path | None:
    """The checkpoint to load: of `tag`, else the latest. None where nothing was saved yet and no tag is asked for.

    Raises UserError for a tag that is not there, and for another program's checkpoint.
    """
    if tag is None:
        if not (folder / LATEST).is_file():
            return None
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
    path = folder / tag
    if (path / TRAINING).is_file():
        return path
    if list(path.glob("*model_states.pt")):
        raise UserError(
            f"load_checkpoint: {path} was written by DeepSpeed; convert it with its own zero_to_fp32.py and load the "
            "weights into the model before initialize()"
        )
    there = sorted(p.parent.name for p in folder.glob(f"*/{TRAINING}"))
    raise UserError(
        f"load_checkpoint: {path} is no checkpoint; "
        + (f"these are there: {', '.join(there)}" if there else "none is in this folder")
    )


def read_training(path: Path) -> dict[str, Any]:
    """The counters. Raises UserError for a newer format or a damaged file."""
    try:
        training = json.loads((path / TRAINING).read_text(encoding="utf-8"))
        version = int(training["format"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"load_checkpoint: {path / TRAINING} is damaged; load another tag") from None
    if version > FORMAT:
        raise UserError(f"load_checkpoint: {path} has format {version}, this version reads up to {FORMAT}; update it")
    return training


def read_extras(path: Path) -> dict[str, Any]:
    """Client state, scheduler and parameter groups, tensors on the CPU. Raises UserError for a damaged file."""
    try:
        return torch.load(path / EXTRAS, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"load_checkpoint: {path / EXTRAS} is damaged ({reason}); load another tag") from None


def read_shapes(path: Path) -> dict[str, TensorStorageMetadata]:
    """Key -> what is known of the saved tensor, `size` and `properties.dtype`. Raises UserError for a damaged one."""
    try:
        metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError):
        raise UserError(f"load_checkpoint: {path / '.metadata'} is missing or damaged; load another tag") from None
    return {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}


def read_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Fills `tensors` (flat keys, DTensors or plain) from the checkpoint. A collective."""
    if tensors:
        _dcp(lambda: dcp.load(tensors, checkpoint_id=path), f"{path}: cannot be read")


def _dcp(action: Callable[[], Any], what: str) -> None:
    try:
        action()
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()), (error, None))[0]
        reason = " ".join(str(cause).split())[:200]
        raise UserError(f"checkpoint: {what}: {reason}") from None
