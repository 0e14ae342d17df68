"""Hugging Face models: built on meta, sharded, then each rank reads only its slices of the safetensors files.

Phases: `build_on_meta` -> (sharding) -> `materialise` -> `load_weights` or `init_random_weights`.

Never `model.to(bfloat16)`: it would round the rotary frequencies. The model is built in its dtype, so that buffers
keep theirs. Which tensor of which file is which slice of a parameter says `heavylift.models.stored`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.config.schema import ModelConfig
from heavylift.errors import UserError, first_line
from heavylift.models.names import kept_in_float32, persistent_buffers, unique_parameters
from heavylift.models.stored import Layout, StoredTensor, check_weights

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
    """The causal language model of a config, on the meta device, with `freeze` applied.

    Whatever is trained is in `dtype`: FSDP2 reduces the gradients of a layer together. Some families make their
    router's weights in float32 whatever the model's dtype; they are as precise in the optimizer's masters here, like
    all others. What is not trained and they want in float32 is in float32.
    """
    from transformers import AutoModelForCausalLM

    # None: sdpa where the model's code has it, else eager
    attention = None if config.attn_implementation == "auto" else config.attn_implementation
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
            )
    except (ValueError, KeyError, ImportError) as error:
        why = first_line(error)
        raise UserError(f"{config.model_name_or_path}: no causal language model can be built: {why}") from None
    if not isinstance(model.config, type(hf_config)):
        raise UserError(
            f"{Path(config.model_name_or_path) / 'config.json'}: a {type(hf_config).__name__} describes more than the "
            f"language model {type(model).__name__}, and the rest would be lost; save that one first (from_pretrained "
            "and save_pretrained of AutoModelForCausalLM) and train its folder"
        )
    model.config.use_cache = False
    problem = _another_objective(model)
    if problem is not None:
        raise UserError(f"{Path(config.model_name_or_path) / 'config.json'}: {problem}")
    _freeze(model, config.freeze)
    _set_dtypes(model, dtype)
    return model


def _set_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(dtype)
    for name in kept_in_float32(model):
        owner, _, own_name = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), own_name)
        tensor.data = tensor.data.float()


def _another_objective(model: nn.Module) -> str | None:
    """Why the next token's cross-entropy is not what this model is to be trained on."""
    config: Any = model.config
    name = type(model).__name__
    if _sees_what_follows(model):
        return (
            f"{name} lets every token see those that follow it, so there is nothing to predict; set is_decoder to true "
            "where it has that key, or choose a causal model"
        )
    if getattr(config.get_text_config(), "output_router_logits", False):
        return (
            f"output_router_logits asks for the auxiliary loss of {name}'s router, which is not computed here; set it "
            "to false to train without"
        )
    return None


def _sees_what_follows(model: nn.Module) -> bool:
    """Encoders with a language model's head (BERT's family, unless they are told to decode), XLM, XLNet."""
    config: Any = model.config
    if config.model_type == "xlnet" or getattr(config, "causal", None) is False:
        return True
    # some causal models have the key too (GPT-NeoX), and none of their modules goes by it
    return getattr(config, "is_decoder", None) is False and any(
        vars(module).get("is_decoder") is False or vars(module).get("is_causal") is False for module in model.modules()
    )


def attention_of(model: nn.Module) -> str:
    """The attention code that a transformers model runs: `sdpa` or `eager`."""
    config: Any = model.config
    return str(config._attn_implementation)


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
    beside = _beside_the_text(model)
    if beside:
        raise UserError(
            f"model.freeze: {type(model).__name__} has parts that text does not train; add "
            + ", ".join(f"'{prefix}.*'" for prefix in beside)
        )


def _beside_the_text(model: nn.Module) -> list[str]:
    """Prefixes of trainable parameters of a model of images or sound that are not of its language model."""
    config: Any = model.config
    if not {"vision_config", "audio_config"} & set(config.sub_configs):
        return []
    whole: Any = model
    parts = (whole.get_decoder(), whole.get_output_embeddings())
    text = {p for part in parts if part is not None for p in part.parameters()}
    names = [name for name, p in model.named_parameters() if p.requires_grad and p not in text]
    return sorted({".".join(name.split(".")[:2]) for name in names})


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocates all tensors of a (sharded) meta model on `device` and computes its buffers. Before weights are loaded.

    `to_empty` leaves garbage in buffers that no checkpoint holds (rotary frequencies) and raises nothing; the model's
    own `_init_weights` knows how to compute them. Raises UserError for a buffer that it does not compute, and for a
    tensor that is neither parameter nor buffer: both have values in the model's constructor only.
    """
    model.to_empty(device=device)
    _refuse_stray_tensors(model)
    parts = list(_with_owners(model, None))
    for param in model.parameters():
        vars(param)["_is_hf_initialized"] = True  # so transformers leaves it alone
    before = _computed_buffers(model)
    with torch.no_grad():
        for module, owner in parts:
            if module._buffers and owner is not None:
                owner._init_weights(module)
        if _untouched(model, before):
            # Falcon-H1 computes the buffers of a layer's parts where it has the whole body
            for module, owner in parts:
                if not module._buffers and owner is not None:
                    owner._init_weights(module)
    for param in model.parameters():
        del vars(param)["_is_hf_initialized"]
    left = _untouched(model, before)
    if left:
        raise UserError(
            f"{_class_name(model)}: buffer {left[0]} is in no checkpoint and its _init_weights does not compute it; "
            "such a model cannot be trained here"
        )


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")  # which `fully_shard` puts in front


def _computed_buffers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(id, version) of the buffers that no checkpoint holds."""
    stored = persistent_buffers(model)
    return {
        name: (id(buffer), buffer._version)
        for name, buffer in model.named_buffers()
        if name not in stored and buffer.numel() > 0
    }


def _untouched(model: nn.Module, before: dict[str, tuple[int, int]]) -> list[str]:
    """Buffers that nobody has written or replaced since."""
    return [name for name, state in _computed_buffers(model).items() if before.get(name) == state]


def _with_owners(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Every module with the innermost model around it that has an `_init_weights`, as transformers does it."""
    if callable(getattr(module, "_init_weights", None)):
        owner = module
    yield module, owner
    for child in module.children():
        yield from _with_owners(child, owner)


def _refuse_stray_tensors(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                where = f"{name}.{key}" if name else key
                raise UserError(
                    f"{_class_name(model)}: {where} is a tensor that is neither parameter nor buffer, so its values "
                    "are in the model's constructor only; such a model cannot be trained here"
                )


def local_slice(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """A parameter's local shard (a view) and where it lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def load_weights(model: nn.Module, folder: Path, stored: Layout | None = None) -> None:
    """Fills a materialised (sharded) model from safetensors; each rank reads its own slices only.

    Host memory: one slice at a time. The dtype of the files is converted to that of the parameters. `stored`: what
    `check_weights` found for this model; None checks here, and raises what that raises.
    """
    if stored is None:
        stored = check_weights(model, folder)
    tensors: dict[str, torch.Tensor] = {**unique_parameters(model), **persistent_buffers(model)}
    locals_ = {name: local_slice(tensors[name]) for name in stored}
    with torch.no_grad(), ExitStack() as stack:
        opened: Path | None = None
        pieces = [(piece.path, name, piece) for name, boxes in stored.items() for piece in boxes]
        for path, name, piece in sorted(pieces, key=lambda each: each[0]):
            if path != opened:
                stack.close()
                file, opened = stack.enter_context(safe_open(path, framework="pt")), path
            copy_box(file, piece, *locals_[name])


def copy_box(file: Any, piece: StoredTensor, local: torch.Tensor, where: tuple[slice, ...]) -> None:
    """Copies what `piece`, a tensor of the opened file, has of a slice: `local` is the slice, `where` its place in the
    whole parameter."""
    if not where:
        local.copy_(file.get_tensor(piece.name))
        return
    starts = [max(box.start, part.start) for box, part in zip(piece.place, where, strict=True)]
    stops = [min(box.stop, part.stop) for box, part in zip(piece.place, where, strict=True)]
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return
    inside = [slice(a - begin, b - begin) for a, b, begin in zip(starts, stops, piece.start, strict=True)]
    mine = tuple(slice(a - part.start, b - part.start) for a, b, part in zip(starts, stops, where, strict=True))
    # a tensor that is one of several merged has no dimension for its number among them
    values = file.get_slice(piece.name)[tuple(inside[len(piece.box) - len(piece.shape) :])]
    local[mine].copy_(values.reshape(local[mine].shape))


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


def gather_whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sharded tensor, whole, on the CPU, floating point in `dtype`. A collective: every rank must ask."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to(device="cpu", dtype=dtype if whole.is_floating_point() else whole.dtype)


def model_max_length(hf_config: Any) -> int | None:
    """Longest sequence that the model's positions allow, None if the config does not say."""
    length = getattr(hf_config, "max_position_embeddings", None)
    return int(length) if length and math.isfinite(length) else None
