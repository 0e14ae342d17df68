"""Writes the tensors of a checkpoint one after the other, so that saving takes hardly any memory.

States are float32 in a checkpoint, however they are stored, and all of them at once would take more than a plan leaves
free. So they are made when it is their turn (`Later`), and gone when they are written. torch's FileSystemWriter keeps
what it has written until the file is closed: copies of what lies on the device, and whatever was made for it.

The files are torch's: `dcp.FileSystemReader` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from heavylift.offload.groups import local_tensor


@dataclass(frozen=True)
class Later:
    """A tensor that is made when it is written."""

    like: torch.Tensor
    """Its shape, dtype and, of a DTensor, placement; on the meta device."""
    make: Callable[[], torch.Tensor]
    """The tensor, new each time."""


def made(tensor: torch.Tensor | Later) -> torch.Tensor:
    """The tensor itself."""
    return tensor.make() if isinstance(tensor, Later) else tensor


def save(path: Path, tensors: Mapping[str, torch.Tensor | Later]) -> None:
    """Writes flat keys -> tensors into the folder `path`. A collective; each rank its shards, one file per rank.

    Of what is copied or made for it, one tensor's shard is in memory at a time. Raises dcp.api.CheckpointException.
    """
    planned = {key: tensor.like if isinstance(tensor, Later) else tensor for key, tensor in tensors.items()}
    later = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Later)}
    dcp.save(planned, storage_writer=_OneByOne(path), planner=_Planner(later))


class _Planner(dcp.DefaultSavePlanner):
    def __init__(self, later: Mapping[str, Later]) -> None:
        super().__init__()
        self._later = later

    def lookup_object(self, index: MetadataIndex) -> Any:
        later = self._later.get(index.fqn)
        return super().lookup_object(index) if later is None else local_tensor(later.make())


class _OneByOne(dcp.FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = plan.storage_data
        assert isinstance(prefix, _StoragePrefix), f"{prefix=}"
        name = f"{prefix.prefix}0.distcp"
        results = []
        with open(Path(self.path) / name, "wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                torch.save(_alone_on_cpu(planner.resolve_data(item)), stream)
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _alone_on_cpu(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor), f"{type(tensor)}: everything else is in the small files"
    tensor = tensor.detach().cpu()
    # torch.save writes all of the memory that a view shows a part of
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
