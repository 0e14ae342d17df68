"""Do all ranks bring the same to `initialize`? Told in one line, where otherwise a collective would abort or hang.

Compared: names, shapes, dtypes and requires_grad of parameters, shapes and dtypes of buffers, the parameter groups, and
the settings that training depends on. Values are not: rank 0's are taken. Left out: what only reports (monitors,
prints, timers), which ranks may choose on their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from heavylift.api.distributed import cpu_group
from heavylift.api.optimizer_choice import OptimizerChoice
from heavylift.api.partition import find_partition
from heavylift.config.deepspeed.settings import Settings
from heavylift.errors import UserError

_SETTINGS = {
    "stage": "zero_optimization.stage",
    "offload.tier": "zero_optimization.offload_optimizer: where",
    "offload.ratio": "zero_optimization.offload_optimizer.ratio",
    "offload.schedule": "heavylift.schedule",
    "offload.gradients_on": "heavylift.gradients_on",
    "offload.streamed_share": "heavylift.streamed_share",
    "state_format": "heavylift.state_format (or bf16.bf16_optimizer_states)",
    "precision": "the dtype of parameters (bf16, fp16)",
    "loss_scale": "fp16",
    "autocast": "torch_autocast",
    "cast_inputs": "fp16.auto_cast",
    "skip_nonfinite": "bf16.check_grad_overflow",
    "batch": "batch sizes: ",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "gradient_clipping": "gradient_clipping",
    "managed_accumulation": "managed_gradient_accumulation",
    "dataloader_drop_last": "dataloader_drop_last",
    "checkpointing": "activation_checkpointing",
    "gather_16bit_weights_on_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "buffer_dtype": "data_types.buffer_dtype",
}
_GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "momentum")
_MOST_TOLD = 3


def check_same_everywhere(
    model: nn.Module, settings: Settings, choice: OptimizerChoice | None, names: list[list[str]]
) -> None:
    """Raises UserError, the same on every rank, where ranks differ. A collective; nothing on one rank.

    `names`: those of the parameters of each group of `choice`.
    """
    if dist.get_world_size() == 1:
        return
    facts = list(_facts(model, settings, choice, names))
    problems = find_differences(facts, cpu_group())
    if problems:
        more = len(problems) - _MOST_TOLD
        told = problems[:_MOST_TOLD]
        if more > 0:
            told[-1] += f" (and {more} more)"
        raise UserError(*told)


def find_differences(facts: list[tuple[str, str, str]], group: dist.ProcessGroup) -> list[str]:
    """One message for each fact (what, its value, remedy) in which some rank differs from rank 0. A collective.

    The same list on every rank. Digests are exchanged first: a large model has many facts, and they mostly agree.
    """
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest, group)
    if len(set(digests)) == 1:
        return []
    first: list[Any] = [facts]
    dist.broadcast_object_list(first, src=0, group=group)
    mine = _differences(first[0], facts, dist.get_rank())
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine, group)
    found: dict[str, str] = {}
    for messages in everybodys:
        for what, message in messages:
            found.setdefault(what, message)
    return list(found.values())


def _differences(
    first: list[tuple[str, str, str]], mine: list[tuple[str, str, str]], rank: int
) -> list[tuple[str, str]]:
    theirs, ours = ({what: value for what, value, _ in facts} for facts in (first, mine))
    remedies = {what: remedy for what, _, remedy in (*first, *mine)}
    found = [
        (what, f"{what}: {theirs.get(what, 'absent')} on rank 0, {ours.get(what, 'absent')} on rank {rank}; {remedy}")
        for what, remedy in remedies.items()
        if theirs.get(what) != ours.get(what)
    ]
    order, own_order = ([what for what, *_ in facts if what.startswith("model:")] for facts in (first, mine))
    if order != own_order and set(order) == set(own_order):
        found.insert(0, ("order", f"model: parameters have another order on rank {rank} than on rank 0; {_MODEL}"))
    return found


_MODEL = "build the same model on every rank"
_CONFIG = "give every rank the same configuration"
_GROUPS = "group the parameters alike on every rank"


def _facts(
    model: nn.Module, settings: Settings, choice: OptimizerChoice | None, names: list[list[str]]
) -> Iterator[tuple[str, str, str]]:
    for name, value in _values("", settings):
        key = next((k for k in _SETTINGS if name == k or name.startswith(f"{k}.")), None)
        if key is not None:
            yield f"initialize: {_SETTINGS[key]}{name.removeprefix(key)}".replace(": .", ": "), value, _CONFIG
    for name, param in model.named_parameters():
        partition = find_partition(param)
        shape = tuple(param.shape if partition is None else partition.shape)
        trained = "" if param.requires_grad else ", frozen"
        yield f"model: parameter {name}", f"{shape} {_dtype(param)}{trained}", _MODEL
    for name, buffer in model.named_buffers():
        yield f"model: buffer {name}", f"{tuple(buffer.shape)} {_dtype(buffer)}", _MODEL
    if choice is None:
        return
    yield "initialize: optimizer", _optimizer_kind(choice), "use the same on every rank"
    for index, (group, own) in enumerate(zip(choice.param_groups, names, strict=True)):
        values = {key: group[key] for key in _GROUP_KEYS if key in group}
        yield f"optimizer: values of parameter group {index}", repr(values), _GROUPS
        short = f"{own[:2]} and {len(own) - 2} more" if len(own) > 2 else repr(own)
        digest = hashlib.sha256(repr(own).encode()).hexdigest()[:8]
        yield f"optimizer: parameters of group {index}", f"{short} (digest {digest})", _GROUPS


def _values(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, value as text) of everything in nested settings."""
    if not is_dataclass(value):
        yield prefix, str(value)
        return
    for each in fields(value):
        yield from _values(f"{prefix}.{each.name}".lstrip("."), getattr(value, each.name))


def _optimizer_kind(choice: OptimizerChoice) -> str:
    if choice.client is not None:
        return type(choice.client).__name__
    return "AdamW" if choice.tiered else "the configuration's"


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
