"""Where a model's tensors lie in the safetensors files of its folder, by the names that the files have.

transformers renames tensors while loading (GPT-NeoX's head) and merges them (the experts of a layer are many matrices
in a file and one in the model). It has a list of that for every family, which is asked here; but instead of merging
tensors, each one is given its place in its parameter: a `StoredTensor` is a box. So a rank reads its slices of merged
parameters too, and the export cuts them again at the same places, under the same names.

Left out: boxes of a file's tensor (one tensor that becomes several parameters), and whatever else changes values.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from heavylift.errors import UserError
from heavylift.models.names import persistent_buffers, tied_aliases, unique_parameters

Layout = Mapping[str, "tuple[StoredTensor, ...]"]
"""Parameter or buffer -> the tensors that it consists of, none of which overlap."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a model folder: a whole parameter, or a box of one."""

    name: str
    """In the file: a tied weight may be stored under either of its names."""
    path: Path
    shape: tuple[int, ...]
    """In the file."""
    start: tuple[int, ...]
    """Where its box of the parameter begins."""
    box: tuple[int, ...]
    """The shape of that box: `shape`, for one of several merged tensors with a 1 in front."""

    @property
    def place(self) -> tuple[slice, ...]:
        """The box as an index into the whole parameter."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.box, strict=True))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def check_weights(model: nn.Module, folder: Path) -> dict[str, tuple[StoredTensor, ...]]:
    """Compares names and shapes of a model (meta is enough) with its files: tensor name -> where to read it from.

    Raises UserError for missing tensors, wrong shapes, and tensors that the model does not have, but for those that
    transformers knows as left over from older versions; and where transformers rebuilds tensors while loading in a way
    that is not known here.
    """
    sources = _stored_tensors(folder)
    try:
        placed = _place(model, sources.values())
    except _UnknownConversion as error:
        raise UserError(f"{folder}: {error}; such a model cannot be trained here") from None
    aliases = tied_aliases(model)
    wanted: dict[str, torch.Tensor] = {**unique_parameters(model), **persistent_buffers(model)}
    layout = {}
    problems = []
    for name, tensor in wanted.items():
        names = (name, *(alias for alias, first in aliases.items() if first == name))
        stored = next((placed[n] for n in names if n in placed), None)
        if stored is None:
            problems.append(f"{folder}: tensor {name} {tuple(tensor.shape)} is not in any safetensors file")
            continue
        problem = _misfit(name, tuple(tensor.shape), stored)
        if problem is not None:
            problems.append(problem)
        layout[name] = stored
    used = {tensor.name for target in (*wanted, *aliases) for tensor in placed.get(target, ())}
    unused = sorted(name for name in set(sources) - used if not _may_be_left_over(model, name))
    if unused:
        problems.append(
            f"{folder}: {len(unused)} tensors have no place in the model of config.json, the first is {unused[0]}; "
            "config.json and the weights do not belong together"
        )
    if problems:
        shown = problems[:8] + ([f"{folder}: and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise UserError(*shown)
    return layout


def default_layout(model: nn.Module) -> dict[str, tuple[StoredTensor, ...]]:
    """How transformers would name and cut the tensors of a model that no file was read for. Paths are empty.

    To be asked before `fully_shard`, which gives modules other classes: transformers goes by their names.
    """
    tensors = {**unique_parameters(model), **persistent_buffers(model)}
    whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    if _is_hugging_face(model):
        from transformers.core_model_loading import revert_weight_conversion

        stored = revert_weight_conversion(model, whole)  # type: ignore[arg-type]
        files = [_whole(name, Path(), tuple(tensor.shape)) for name, tensor in stored.items()]
        placed = _place(model, files)
        if all(
            name in placed and _misfit(name, tuple(tensor.shape), placed[name]) is None
            for name, tensor in tensors.items()
        ):
            return {name: placed[name] for name in tensors}
    # what cannot be cut again is stored as it is, which transformers reads as well
    return {name: (_whole(name, Path(), tuple(tensor.shape)),) for name, tensor in tensors.items()}


class _UnknownConversion(Exception):
    """transformers does something to these tensors that no box describes."""


def _whole(name: str, path: Path, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name, path, shape, (0,) * len(shape), shape)


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's files, each of which is opened once."""
    found = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                found[name] = _whole(name, path, tuple(file.get_slice(name).get_shape()))
    return found


def _is_hugging_face(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _place(model: nn.Module, tensors: Iterable[StoredTensor]) -> dict[str, tuple[StoredTensor, ...]]:
    """Tensors of files by the parameter or buffer that they belong to, renamed as transformers would.

    What belongs to none stands under its new name. Raises _UnknownConversion.
    """
    if not _is_hugging_face(model):
        return {tensor.name: (tensor,) for tensor in tensors}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = dict.fromkeys(model.state_dict(), True), str(model.base_model_prefix)
    placed: dict[str, tuple[StoredTensor, ...]] = {}
    merged: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    for tensor in sorted(tensors, key=lambda tensor: dot_natural_key(tensor.name)):
        name, pattern = rename_source_key(tensor.name, renamings, converters, prefix, state)
        if name not in state and tensor.name in state:
            name, pattern = tensor.name, None  # as the model has it already
        if pattern is None:
            placed[name] = (tensor,)
        else:
            merged[name][pattern].append(tensor)
    for name, sources in merged.items():
        placed[name] = _boxes(name, sources, by_pattern[next(iter(sources))])
    return placed


def _boxes(name: str, sources: Mapping[str, list[StoredTensor]], converter: Any) -> tuple[StoredTensor, ...]:
    """The tensors of each source pattern stacked, then these side by side: what MergeModulelist and Concatenate do."""
    operations = {type(operation).__name__: operation for operation in converter.operations}
    merge, concatenate = operations.pop("MergeModulelist", None), operations.pop("Concatenate", None)
    if operations or len(converter.target_patterns) != 1 or (merge is not None and merge.dim != 0):
        names = ", ".join(type(operation).__name__ for operation in converter.operations)
        raise _UnknownConversion(f"transformers rebuilds {name} while loading ({names})")
    boxes = []
    offset = 0
    for pattern in (p for p in converter.source_patterns if p in sources):
        width = 0
        for index, tensor in enumerate(sources[pattern]):
            start, box = list(tensor.start), tensor.box
            if merge is not None:
                start, box = [index, *start], (1, *box)
            if concatenate is not None:
                width = max(width, box[concatenate.dim])
                start[concatenate.dim] += offset
                offset += 0 if merge is not None else box[concatenate.dim]
            boxes.append(replace(tensor, start=tuple(start), box=box))
        offset += width if merge is not None else 0
    return tuple(boxes)


def _misfit(name: str, shape: tuple[int, ...], stored: tuple[StoredTensor, ...]) -> str | None:
    """What is wrong with the shapes of the tensors that a parameter of this shape is to consist of."""
    first = stored[0]
    if len(stored) == 1 and first.box != shape:
        return f"{first.path}: tensor {first.name} has shape {first.shape}, config.json asks for {shape}"
    inside = all(
        len(tensor.box) == len(shape) and all(p.stop <= size for p, size in zip(tensor.place, shape, strict=True))
        for tensor in stored
    )
    elements = sum(torch.Size(tensor.box).numel() for tensor in stored)
    if inside and elements == torch.Size(shape).numel():
        return None
    return (
        f"{first.path}: {name} {shape} consists of {len(stored)} tensors, the first is {first.name} {first.shape}; "
        "together they have another shape"
    )


def _may_be_left_over(model: nn.Module, name: str) -> bool:
    """Tensors of older checkpoints that are computed today, and what the model's class says may be there."""
    patterns = [r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$"]
    patterns += list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return any(re.search(pattern, name) for pattern in patterns)
