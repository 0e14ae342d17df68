"""Hugging Face models: built on meta, sharded, then each rank reads only its slices of the safetensors files.

Phases: `build_on_meta` -> (sharding) -> `materialise` -> `load_weights` or `init_random_weights`.

Never `model.to(bfloat16)`: it would round the rotary frequencies. The model is built in its dtype, so that buffers
keep theirs. Left out: checkpoints whose tensor names or shapes Hugging Face converts while loading (merged experts).
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.config.schema import ModelConfig
from heavylift.errors import UserError

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str, device_type: str) -> torch.dtype:
    """The parameter dtype: `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device_type == "cpu" else torch.bfloat16
    return DTYPES[name]


def load_hf_config(folder: Path, trust_remote_code: bool) -> Any:
    """The folder's `config.json` as a transformers config. Raises UserError when transformers refuses it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder / 'config.json'}: transformers cannot read this config: {reason}") from None


def build_on_meta(hf_config: Any, config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """The causal language model of a config, on the meta device, in `dtype`, with `freeze` applied."""
    from transformers import AutoModelForCausalLM

    attention = "sdpa" if config.attn_implementation == "auto" else config.attn_implementation
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
            )
    except (ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{config.model_name_or_path}: no causal language model can be built: {reason}") from None
    model.config.use_cache = False
    _freeze(model, config.freeze)
    return model


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    names = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(f"model.freeze: {pattern!r} matches no parameter (first: {next(iter(names))})")
        for name in matched:
            names[name].requires_grad_(False)
    if not any(p.requires_grad for p in names.values()):
        raise UserError("model.freeze: every parameter is frozen; nothing is left to train")


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocates all tensors of a (sharded) meta model on `device` and computes its non-persistent buffers.

    `to_empty` leaves garbage in buffers that no checkpoint holds (rotary frequencies) and raises nothing; the model's
    own `_init_weights` knows how to compute them. Must run before the weights are loaded.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                model._init_weights(module)  # type: ignore[operator]


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their first name: tied ones appear once."""
    return dict(model.named_parameters())


def tied_aliases(model: nn.Module) -> dict[str, str]:
    """Second names of tied parameters -> the name under which they are stored. By identity, not by a config flag."""
    first: dict[nn.Parameter, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in first:
            aliases[name] = first[param]
        else:
            first[param] = name
    return aliases


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that checkpoints hold."""
    state = set(model.state_dict().keys())
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def local_slice(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """A parameter's local shard (a view) and where it lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a model folder."""

    name: str
    """In the file: a tied weight may be stored under either of its names."""
    path: Path
    shape: tuple[int, ...]


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's files, each of which is opened once."""
    found = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                found[name] = StoredTensor(name, path, tuple(file.get_slice(name).get_shape()))
    return found


def check_weights(model: nn.Module, folder: Path) -> dict[str, StoredTensor]:
    """Compares names and shapes of a model (meta is enough) with its files: tensor name -> where to read it from.

    Raises UserError for missing tensors, wrong shapes, and tensors that the model does not have, but for those that
    transformers knows as left over from older versions.
    """
    sources = _stored_tensors(folder)
    aliases = tied_aliases(model)
    wanted: dict[str, torch.Tensor] = {**unique_parameters(model), **persistent_buffers(model)}
    by_name = {}
    problems = []
    for name, tensor in wanted.items():
        names = (name, *(alias for alias, first in aliases.items() if first == name))
        stored = next((sources[n] for n in names if n in sources), None)
        if stored is None:
            problems.append(f"{folder}: tensor {name} {tuple(tensor.shape)} is not in any safetensors file")
            continue
        if stored.shape != tuple(tensor.shape):
            problems.append(
                f"{stored.path}: tensor {stored.name} has shape {stored.shape}, config.json asks for "
                f"{tuple(tensor.shape)}"
            )
        by_name[name] = stored
    unused = sorted(set(sources) - {stored.name for stored in by_name.values()} - set(aliases))
    unused = [name for name in unused if not _may_be_left_over(model, name)]
    if unused:
        problems.append(
            f"{folder}: {len(unused)} tensors have no place in the model of config.json, the first is {unused[0]}; "
            "config.json and the weights do not belong together"
        )
    if problems:
        shown = problems[:8] + ([f"{folder}: and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise UserError(*shown)
    return by_name


def _may_be_left_over(model: nn.Module, name: str) -> bool:
    """Tensors of older checkpoints that are computed today, and what the model's class says may be there."""
    patterns = [r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$"]
    patterns += list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return any(re.search(pattern, name) for pattern in patterns)


def load_weights(model: nn.Module, folder: Path, stored: dict[str, StoredTensor] | None = None) -> None:
    """Fills a materialised (sharded) model from safetensors; each rank reads its own slices only.

    Host memory: one slice at a time. The dtype of the files is converted to that of the parameters. `stored`: what
    `check_weights` found for this model; None checks here, and raises what that raises.
    """
    if stored is None:
        stored = check_weights(model, folder)
    tensors: dict[str, torch.Tensor] = {**unique_parameters(model), **persistent_buffers(model)}
    with torch.no_grad():
        for path in sorted({source.path for source in stored.values()}):
            with safe_open(path, framework="pt") as file:
                for name, source in stored.items():
                    if source.path != path:
                        continue
                    local, where = local_slice(tensors[name])
                    if local.numel() > 0:
                        local.copy_(file.get_slice(source.name)[where] if where else file.get_tensor(source.name))


def init_random_weights(model: nn.Module, std: float, seed: int) -> None:
    """Random weights for benchmarks: matrices normal(0, std), norm weights one, biases zero.

    Seeded per parameter and shard, so the values depend on the seed and on the number of shards.
    """
    with torch.no_grad():
        for index, (name, param) in enumerate(unique_parameters(model).items()):
            local, where = local_slice(param)
            if param.ndim < 2:
                local.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(device=local.device)
            generator.manual_seed(hash((seed, index, where[0].start)) & (2**63 - 1))
            local.normal_(0.0, std, generator=generator)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters of the whole model, tied ones counted once."""
    params = list(unique_parameters(model).values())
    return sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)


def iterate_whole(params: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers one tensor after the other, whole, on the CPU in `dtype`. A collective: every rank must iterate."""
    for name, param in params:
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        yield name, whole.detach().to(device="cpu", dtype=dtype if whole.is_floating_point() else whole.dtype)


def model_max_length(hf_config: Any) -> int | None:
    """Longest sequence that the model's positions allow, None if the config does not say."""
    length = getattr(hf_config, "max_position_embeddings", None)
    return int(length) if length and math.isfinite(length) else None
