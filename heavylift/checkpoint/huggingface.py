"""Writing a Hugging Face folder from a sharded model, tensor by tensor.

Every tensor is gathered, cast and written before the next one is touched, so no rank ever holds the model, nor a whole
file of it. The safetensors format (8 bytes header length, JSON header, raw data) is written here because its library
only saves what is whole in memory. The folder gets its final name when it is complete.

Left out: LoRA adapters.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from heavylift.errors import UserError
from heavylift.files import sync
from heavylift.models.load import DTYPES, gather_whole
from heavylift.models.names import kept_in_float32, persistent_buffers, unique_parameters
from heavylift.models.stored import Layout, default_layout

_SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
                       torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
                       torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the files: a parameter, or a box of one."""

    name: str
    shape: tuple[int, ...]
    source: torch.Tensor
    """The parameter or buffer, sharded."""
    place: tuple[slice, ...]
    """The box as an index into the whole of it."""
    dtype: torch.dtype
    """In the file."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file to write: its name, its tensors in order, the rank that writes it."""

    name: str
    tensors: tuple[SavedTensor, ...]
    writer_rank: int


def plan_tensors(model: nn.Module, layout: Layout, dtype: torch.dtype) -> list[SavedTensor]:
    """What the files are to hold, parameter by parameter, under the names of `layout`.

    In `dtype`; but nobody trains a buffer, and what is kept in float32 would mean something else when rounded.
    """
    buffers, float32 = persistent_buffers(model), kept_in_float32(model)

    def saved_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.promote_types(tensor.dtype, dtype) if name in buffers or name in float32 else dtype

    return [
        SavedTensor(stored.name, stored.shape, tensor, stored.place, saved_dtype(name, tensor))
        for name, tensor in {**unique_parameters(model), **buffers}.items()
        for stored in layout[name]
    ]


def plan_files(tensors: Iterable[SavedTensor], max_bytes: int, world_size: int) -> list[ShardFile]:
    """Splits tensors, in order, into files of at most `max_bytes` (a larger tensor gets a file of its own)."""
    files: list[list[SavedTensor]] = []
    size = math.inf
    for tensor in tensors:
        tensor_bytes = tensor.num_bytes
        if size + tensor_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor_bytes
    if len(files) == 1:
        return [ShardFile("model.safetensors", tuple(files[0]), 0)]
    return [
        ShardFile(f"model-{i + 1:05d}-of-{len(files):05d}.safetensors", tuple(content), i % world_size)
        for i, content in enumerate(files)
    ]


def save_model(
    model: nn.Module,
    folder: Path,
    *,
    hf_config: Any,
    tokenizer: Any | None,
    dtype: str,
    max_shard_bytes: int,
    layout: Layout | None = None,
    generation_config: Path | None = None,
) -> None:
    """Writes `model` as a Hugging Face folder. A collective: all ranks call it; the folder is shared by the ranks.

    Parameters are written in `dtype`, but what the family keeps in float32 and nobody trained, and buffers, no narrower
    than they are. Tied weights are written once. `layout`: under which names, and which parameters in how many tensors,
    such as `check_weights` found it in the files that were read; None: as transformers does. `generation_config`: a
    file that is taken along where there is one. `folder` must not exist; while it is being written it has the name
    `folder + ".partial"`, which is removed when anything fails. Raises UserError when `folder` is there before anything
    is written, and when a file cannot be written (disk full, no permission), on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    there = [folder.exists()]
    dist.broadcast_object_list(there, src=0)  # the others may see another disk
    if there[0]:
        raise UserError(f"{folder}: is there already; remove it or choose another folder")
    partial = folder.with_name(folder.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    tensors = plan_tensors(model, layout or default_layout(model), DTYPES[dtype])
    files = plan_files(tensors, max_shard_bytes, world_size)
    try:
        _together(lambda: partial.mkdir(parents=True), rank == 0, partial)
        for file in files:
            _write_file(partial, file, rank)
        _together(lambda: _write_small_files(partial, files, hf_config, tokenizer, dtype), rank == 0, partial)
        if generation_config is not None:
            _together(lambda: _copy_if_there(generation_config, partial), rank == 0, partial)
        _together(lambda: _put_into_place(partial, folder), rank == 0, folder)
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _put_into_place(partial: Path, folder: Path) -> None:
    for path in (*partial.iterdir(), partial):
        sync(path)  # after a power cut too, what has the final name is whole
    partial.rename(folder)
    sync(folder.parent)


def _write_file(folder: Path, file: ShardFile, rank: int) -> None:
    """Gathers and writes the tensors of one file; a failed write is told to all ranks after the file."""
    writes = rank == file.writer_rank
    stream: IO[bytes] | None = None
    error: Exception | None = None
    try:
        if writes:
            stream = open(folder / file.name, "wb")
            stream.write(_header(file.tensors))
    except Exception as caught:
        error = caught
    # the gathers are collectives: a rank that cannot write goes on gathering and tells the others afterwards
    source: torch.Tensor | None = None
    for tensor in file.tensors:
        if tensor.source is not source:  # once for all of its boxes in this file
            source = tensor.source
            whole = gather_whole(source, tensor.dtype)
        if writes and error is None and stream is not None:
            try:
                stream.write(whole[tensor.place].contiguous().flatten().view(torch.uint8).numpy().data)
            except Exception as caught:
                error = caught
    try:
        if stream is not None:
            stream.close()
    except OSError as caught:
        error = error or caught
    _raise_together(error, folder / file.name)


def _header(tensors: Iterable[SavedTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def _write_small_files(
    folder: Path,
    files: list[ShardFile],
    hf_config: Any,
    tokenizer: Any | None,
    dtype: str,
) -> None:
    """config.json, tokenizer and, with several weight files, their index."""
    if len(files) > 1:
        total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    saved_config = type(hf_config).from_dict(hf_config.to_dict())
    saved_config.dtype = DTYPES[dtype]
    saved_config.use_cache = True
    saved_config.save_pretrained(folder)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


def _copy_if_there(file: Path, folder: Path) -> None:
    """As it is: transformers refuses to write some that it reads, and it ends the answers of many a chat model."""
    if file.is_file():
        shutil.copyfile(file, folder / file.name)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """`save_pretrained`, with the failed writes of its Rust half (plain exceptions) as OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder / "tokenizer.json")) from None


def _together(action: Callable[[], object], acts: bool, path: Path) -> None:
    """Runs `action`, which writes `path`, on the rank that acts, and raises on every rank where it has failed."""
    error: Exception | None = None
    if acts:
        try:
            action()
        except Exception as caught:
            error = caught
    _raise_together(error, path)


def _raise_together(error: Exception | None, path: Path) -> None:
    """Raises on every rank where any has an error, so that none waits: UserError of an OSError; any other exception, a
    defect, as it is, and RuntimeError on the other ranks. A failed write, unlike `open`, names no file: `path`."""
    reason = None if error is None else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        reason = f"{error.filename or path}: cannot be written: {error.strerror}"
    found: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, reason and (isinstance(error, OSError), reason))
    if error is not None and not isinstance(error, OSError):
        raise error
    for rank, (refused, told) in ((r, each) for r, each in enumerate(found) if each is not None):
        if not refused:
            raise RuntimeError(f"rank {rank} has failed: {told}")
        raise UserError(f"{told}; free the disk or choose another train.output_dir (nothing was left behind)")
