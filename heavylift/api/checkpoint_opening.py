"""Which checkpoint is loaded: the same on every rank, or all of them say why not.

Ranks may see other disks, or a shared one as it was a moment ago. If each decided for itself, one would return or raise
while the others wait for it. Left out: the tensors, whose reading is a collective of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from heavylift.api import checkpoint
from heavylift.api.checkpoint_folders import EXTRAS, METADATA, TRAINING
from heavylift.errors import UserError

_CALL = "load_checkpoint"


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose small files have been read."""

    path: Path
    training: dict[str, Any]
    """Counters, loss scale, steps taken by each parameter."""
    extras: dict[str, Any]
    """Client state, scheduler, parameter groups."""
    shapes: dict[str, TensorStorageMetadata]
    """Key -> what is known of the saved tensor."""


def open_on_all_ranks(load_dir: Any, tag: Any) -> Opened | None:
    """The checkpoint `tag` of `load_dir`, else the one that rank 0 finds named in `latest`. A collective.

    None, on every rank, where nothing was saved yet. Raises UserError, on every rank, where one of them does not find
    it, finds other files than rank 0, or finds them damaged.
    """
    folder, wanted = on_every_rank(lambda: _arguments(load_dir, tag))
    checkpoint.same_on_all_ranks(_CALL, "tag", repr(wanted))
    if wanted is None:
        named = _everybodys(on_every_rank(lambda: checkpoint.read_latest(folder)))
        wanted = named[0]
        if wanted is None:
            rank = next((rank for rank, name in enumerate(named) if name is not None), None)
            if rank is None:
                return None
            raise UserError(
                f"{_CALL}: rank 0 finds no file `latest` in {folder}, rank {rank} finds {named[rank]} named in its "
                "own; load from a folder that all ranks see, or give a tag"
            )
    opened, digest = on_every_rank(lambda: _open(folder, wanted))
    digests = _everybodys(digest)
    other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if other is not None:
        raise UserError(
            f"{_CALL}: rank {other} finds another checkpoint {wanted} than rank 0 (from another time?); load from a "
            "folder that all ranks see, or give each the same files"
        )
    return opened


def on_every_rank(action: Callable[[], checkpoint.T]) -> checkpoint.T:
    """What `action` returns on this rank. A collective; where it fails on some rank, it does on all.

    UserError for an OSError or UserError; any other exception as it is, and RuntimeError on the other ranks.
    """
    failure: Exception | None = None
    try:
        result = action()
    except OSError as error:
        failure = UserError(f"{error.filename or _CALL}: cannot be read: {error.strerror or error}")
    except Exception as error:
        failure = error
    told = _everybodys(None if failure is None else (type(failure).__name__, str(failure)))
    if failure is not None and (None not in told or not isinstance(failure, UserError)):
        raise failure from None
    for rank, (kind, message) in ((rank, each) for rank, each in enumerate(told) if each is not None):
        if kind == UserError.__name__:
            raise UserError(f"rank {rank}: {message}")
        raise RuntimeError(f"rank {rank} has failed: {kind}: {message}")
    return result


def _everybodys(value: checkpoint.T) -> list[checkpoint.T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _arguments(load_dir: Any, tag: Any) -> tuple[Path, str | None]:
    folder = checkpoint.as_folder(_CALL, load_dir)
    return folder, None if tag is None else checkpoint.check_tag(_CALL, tag)


def _open(folder: Path, tag: str) -> tuple[Opened, str]:
    """With a digest of what was read."""
    path = checkpoint.find(folder, tag)
    assert path is not None, f"{tag=}"
    opened = Opened(path, checkpoint.read_training(path), checkpoint.read_extras(path), checkpoint.read_shapes(path))
    digest = hashlib.sha256()
    for name in (TRAINING, EXTRAS, METADATA):
        digest.update((path / name).read_bytes())
    return opened, digest.hexdigest()
