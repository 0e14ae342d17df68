"""Float32 weights out of a training checkpoint, on one process, without the model or a GPU.

    python -m heavylift.api.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--tag TAG]

The masters are what is written: the float32 values behind bfloat16 or float16 parameters. Frozen parameters and buffers
are as they were saved, floating-point ones in float32. Reads checkpoints that `engine.save_checkpoint` wrote; for those
that DeepSpeed wrote use the zero_to_fp32.py that lies beside them.

A weight that several modules share is there once, under its first name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from heavylift.api import checkpoint
from heavylift.api.scalars import narrowed
from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.files import sync

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class _Saved:
    """One tensor to take out."""

    name: str
    key: str
    """Its key in the checkpoint: of the master where there is one."""
    shape: torch.Size
    saved_dtype: torch.dtype
    is_scalar: bool
    """Whether the parameter had no dimension: it is saved with one element."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return torch.float32 if self.saved_dtype.is_floating_point else self.saved_dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """{name: float32 tensor} on the CPU: of `tag`, else of the latest checkpoint in `checkpoint_dir`.

    `lazy_mode` has no effect: tensors are real. Raises UserError for a folder without a checkpoint.
    """
    path = _find(checkpoint_dir, tag)
    return _read(path, _saved_tensors(path, exclude_frozen_parameters))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights to `output_dir`: `pytorch_model.bin`, or `model.safetensors` with `safe_serialization`.

    More than `max_shard_size` ("5GB"; None: no limit) is written as several files with an index, and no more than that
    is in memory at a time. Files of an earlier conversion are replaced once all new ones are on the disk.

    Raises UserError for a folder without a checkpoint, a size that is none, a disk that refuses, and where weights in
    another number of files are there.
    """
    _convert(checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters)


def _convert(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None,
    safe_serialization: bool,
    tag: str | None,
    exclude_frozen_parameters: bool,
) -> list[Path]:
    """The files that were written. Where one cannot be, those that were there all stay as they were."""
    path = _find(checkpoint_dir, tag)
    shards = list(_shards(_saved_tensors(path, exclude_frozen_parameters), _size(max_shard_size)))
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    folder = checkpoint.as_folder("output_dir", output_dir)
    names = _file_names(stem, suffix, len(shards))
    _refuse_other_parts(folder, stem, suffix, names)
    weight_map: dict[str, str] = {}
    written: list[Path] = []
    with ExitStack() as stack:  # whose end gives them their places, those entered first at the end
        index = folder / f"{stem}{suffix}.index.json"
        for name, shard in zip(names, shards, strict=True):
            tensors = _read(path, shard)
            if name == names[0]:
                _make_folder(folder)
                index_part = stack.enter_context(checkpoint.writing(index)) if len(shards) > 1 else None
            part = stack.enter_context(checkpoint.writing(folder / name))
            _write(tensors, part, safe_serialization)
            sync(part)  # now, so that at the end nothing but names is left to change
            written.append(folder / name)
            weight_map |= {saved.name: name for saved in shard}
        if index_part is not None:
            total = sum(saved.num_bytes for shard in shards for saved in shard)
            index_of = {"metadata": {"total_size": total}, "weight_map": weight_map}
            index_part.write_text(json.dumps(index_of, indent=2), encoding="utf-8")
            written.append(index)
    return written


def _file_names(stem: str, suffix: str, number: int) -> list[str]:
    if number == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{index + 1:05d}-of-{number:05d}{suffix}" for index in range(number)]


def _refuse_other_parts(folder: Path, stem: str, suffix: str, names: Sequence[str]) -> None:
    """Who opens a folder with a single file and several would get one of them, which may be of another time."""
    pattern = re.compile(rf"{stem}(-\d+-of-\d+)?{re.escape(suffix)}(\.index\.json)?")
    expected = {*names, f"{stem}{suffix}.index.json"} if len(names) > 1 else set(names)
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    other = next((name for name in there if pattern.fullmatch(name) and name not in expected), None)
    if other is not None:
        raise UserError(
            f"{folder / other}: is there already and belongs to weights in another number of files; remove those, or "
            "choose another folder"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}; choose another folder") from None


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Moves `model` to the CPU and loads the float32 weights into it; returns it. Shared weights stay shared.

    Raises UserError where the names do not match.
    """
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    first_name: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(param, name)
        if name not in state_dict and first in state_dict:
            state_dict[name] = state_dict[first]
    try:
        model.load_state_dict(state_dict, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"{checkpoint_dir}: {' '.join(str(error).split())[:300]}; build the model that was trained"
        ) from None
    return model


def _find(checkpoint_dir: str | Path, tag: str | None) -> Path:
    path = checkpoint.find(checkpoint.as_folder("checkpoint_dir", checkpoint_dir), tag, "zero_to_fp32")
    if path is None:
        raise UserError(
            f"{checkpoint_dir}: no file `latest` here; give the folder that save_checkpoint wrote to, or a tag"
        )
    return path


def _saved_tensors(path: Path, exclude_frozen_parameters: bool) -> list[_Saved]:
    shapes = checkpoint.read_shapes(path)
    training = checkpoint.read_training(path)
    names = [key.removeprefix("model.") for key in shapes if key.startswith("model.")]
    if exclude_frozen_parameters:
        buffers = set(training.get("buffers", ()))
        names = [name for name in names if f"master.{name}" in shapes or name in buffers]
    scalars = set(training.get("scalars", ()))
    return [_describe(name, shapes, name in scalars) for name in names]


def _describe(name: str, shapes: Mapping[str, TensorStorageMetadata], is_scalar: bool) -> _Saved:
    key = f"master.{name}" if f"master.{name}" in shapes else f"model.{name}"
    return _Saved(name, key, torch.Size(shapes[key].size), shapes[key].properties.dtype, is_scalar)


def _read(path: Path, wanted: Sequence[_Saved]) -> dict[str, torch.Tensor]:
    tensors: dict[str, Any] = {saved.key: torch.empty(saved.shape, dtype=saved.saved_dtype) for saved in wanted}
    checkpoint.read_tensors(path, tensors, alone=True)
    whole = {saved.name: tensors[saved.key].to(saved.dtype) for saved in wanted}
    return narrowed(whole, frozenset(saved.name for saved in wanted if saved.is_scalar))


def _write(tensors: dict[str, torch.Tensor], path: Path, safe_serialization: bool) -> None:
    if safe_serialization:
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)


def _shards(wanted: Sequence[_Saved], limit: int | None) -> Iterator[list[_Saved]]:
    shard: list[_Saved] = []
    for saved in wanted:
        if shard and limit is not None and sum(s.num_bytes for s in shard) + saved.num_bytes > limit:
            yield shard
            shard = []
        shard.append(saved)
    yield shard


def _size(text: str | int | None) -> int | None:
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS:
        raise UserError(f"max_shard_size: expected a size such as 5GB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser("zero_to_fp32", description="Float32 weights out of a training checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder that save_checkpoint wrote to")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    options = vars(parser.parse_args(arguments))
    options.pop("debug")
    try:
        written = _convert(**options)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER_ERROR
    for file in written:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
