"""A user's model, made ready: rank 0's values on every rank, one dtype, sharded; masters kept from before rounding.

Only floating-point *parameters* change their dtype. Buffers keep theirs (a rotary `inv_freq` in bfloat16 gives other
positions), unless `data_types.buffer_dtype` asks for it. Parameters made under `zero.Init` come in split over the
ranks and are made whole one group at a time. Those on the meta device get their values when they are sharded, from
what `zero.set_weights_source` was told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from heavylift.api.distributed import broadcast_from_first
from heavylift.api.engine_state import EngineState
from heavylift.api.leaf_modules import keep_leaves_whole
from heavylift.api.meta_weights import WeightsSource, find_source
from heavylift.api.partition import forget, open_whole
from heavylift.api.recompute import is_hugging_face, recompute_layers
from heavylift.api.scalars import widen_scalars
from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.errors import UserError
from heavylift.offload.access import find_states
from heavylift.offload.optimizer import TieredAdamW
from heavylift.sharding import ShardedModel, layers_of, make_mesh, shard_model

TORCH_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
_BLOCKS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class PreparedModel:
    """A sharded model and what was kept from before it was rounded."""

    sharded: ShardedModel
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> this rank's float32 values of a trainable parameter, flat, on the CPU, where its dtype changed."""
    scalars: frozenset[str] = frozenset()
    """Names of parameters that had no dimension, and have one element now."""
    source: WeightsSource | None = None
    """Of a model that came on the meta device."""
    rounded: frozenset[str] = frozenset()
    """Of such a model: the trainable parameters whose files may hold more bits than they have now."""

    def take_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values from before the rounding), which are let go of one by one."""
        if self.source is not None and self.rounded:
            params = dict(self.sharded.module.named_parameters())
            yield from self.source.read_masters({name: params[name] for name in self.rounded})
        while self.masters:
            yield self.masters.popitem()

    @torch.no_grad()
    def give_masters(self, optimizer: TieredAdamW) -> None:
        """Makes the values from before the rounding the optimizer's masters, and lets go of them."""
        params = dict(self.sharded.module.named_parameters())
        for name, values in self.take_masters():
            states = find_states(optimizer, params[name])
            if states is not None:
                states.write("master", values)


def check_model(model: object) -> nn.Module:
    """`model` as a module that can be trained here. Raises UserError, one line per problem."""
    if not isinstance(model, nn.Module):
        raise UserError(f"initialize: model= should be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, EngineState):
        raise UserError("initialize: model= is an engine, of an earlier initialize(); pass a model, or use that engine")
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise UserError(
            "initialize: model= is sharded already, by an earlier initialize() or fully_shard; pass one that is not"
        )
    problems = [
        f"model: parameter {name} has no dimension, and scalars on the meta device cannot be sharded; make it a tensor "
        "of one element"
        for name, param in model.named_parameters()
        if param.ndim == 0 and param.is_meta
    ]
    problems += [
        f"model: parameter {name} is on the meta device and has no value; build the model under heavylift.zero.Init(), "
        "or say with heavylift.zero.set_weights_source(model, FOLDER) where its values are"
        for name, param in model.named_parameters()
        if param.is_meta and find_source(model) is None
    ][:1]
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and type(model).forward is nn.Module.forward:
        problems.append(
            f"initialize: model= is a {type(model).__name__}, which has no forward; pass a module whose forward uses "
            "what is in it"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        problems.append("initialize: model= is a DistributedDataParallel; pass the module inside it (model.module)")
    problems += [
        f"model: parameter {name} is {str(param.dtype).removeprefix('torch.')}, and states are float32; make it a real "
        "tensor, and use torch.view_as_complex in forward"
        for name, param in model.named_parameters()
        if param.requires_grad and param.is_complex()
    ]
    if problems:
        raise UserError(*problems)
    return model


def prepare_model(model: nn.Module, settings: Settings, device: torch.device) -> PreparedModel:
    """Broadcasts, rounds and shards `model` in place. A collective. Raises UserError for dtypes that do not fit.

    Group by group: beside the model itself (nothing, where it was made under `zero.Init`) one whole group and this
    rank's shards exist at a time. The old parameter objects are left empty. Gradients are summed over ranks: the engine
    divides the loss.
    """
    dtype = TORCH_DTYPES[settings.precision]
    _check_dtypes(model, dtype)
    source = find_source(model)
    if source is not None:
        return _prepare_on_meta(model, source, settings, device)
    scalars = widen_scalars(model)
    for buffer in model.buffers():
        broadcast_from_first(buffer, device)
    if settings.buffer_dtype is not None:
        _cast_buffers(model, TORCH_DTYPES[settings.buffer_dtype])
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    recompute_layers(model, settings.checkpointing, device)
    layers = keep_leaves_whole(model, gather_layers(model))
    rounding = _Rounding(dtype, settings.stage, device)
    mesh = make_mesh(settings.stage, device.type)
    sharded = shard_model(model, settings.stage, mesh, layers, rounding.prepare)
    rounding.release()
    _keep_class_names(sharded)
    return PreparedModel(sharded, rounding.masters, scalars)


@torch.no_grad()
def _prepare_on_meta(
    model: nn.Module, source: WeightsSource, settings: Settings, device: torch.device
) -> PreparedModel:
    """Rounds and shards what has no values yet, then lets every rank read its own."""
    dtype = TORCH_DTYPES[settings.precision]
    rounded = set()
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)
            if param.requires_grad:
                rounded.add(name)
    if settings.buffer_dtype is not None:
        _cast_buffers(model, TORCH_DTYPES[settings.buffer_dtype])
    recompute_layers(model, settings.checkpointing, device)
    mesh = make_mesh(settings.stage, device.type)
    sharded = shard_model(model, settings.stage, mesh, keep_leaves_whole(model, gather_layers(model)))
    _keep_class_names(sharded)
    source.fill(model, device)
    return PreparedModel(sharded, source=source, rounded=frozenset(rounded))


def _keep_class_names(sharded: ShardedModel) -> None:
    """`fully_shard` gives modules a class of its own, "FSDPNet" of Net. Libraries choose by a class's name: the Trainer
    shifts labels where it is that of a causal language model, without a word where it is not."""
    for group in sharded.groups:
        made = type(group.module)
        assert issubclass(made, FSDPModule), f"{made} is not under fully_shard"
        original = made.__bases__[1]
        made.__name__, made.__qualname__ = original.__name__, original.__qualname__
        made.__module__ = original.__module__


class _Rounding:
    """What happens to a group's parameters before they are sharded."""

    def __init__(self, dtype: torch.dtype, stage: int, device: torch.device) -> None:
        self.masters: dict[str, torch.Tensor] = {}
        self._dtype = dtype
        self._device = device
        self._num_shards = dist.get_world_size() if stage > 0 else 1
        self._rank = dist.get_rank() if stage > 0 else 0
        self._sharded: list[nn.Parameter] = []

    @torch.no_grad()
    def prepare(self, params: list[tuple[str, nn.Parameter]]) -> None:
        """Rank 0's values, this rank's rows kept in float32, then the new dtype."""
        self.release()
        open_whole(param for _, param in params)
        for name, param in params:
            param.grad = None
            broadcast_from_first(param, self._device)
            self._sharded.append(param)
            if not param.is_floating_point() or param.dtype == self._dtype:
                continue
            if param.requires_grad:
                rows = _own_rows(param.detach(), self._rank, self._num_shards)
                self.masters[name] = rows.to("cpu", torch.float32, copy=True).flatten()
            param.data = param.data.to(self._dtype)

    def release(self) -> None:
        """Empties the whole parameters of the groups that are sharded by now: scripts hold on to the objects."""
        forget(self._sharded)
        for param in self._sharded:
            param.data = param.data.new_empty(0)
        self._sharded.clear()


def gather_layers(model: nn.Module) -> list[nn.Module] | None:
    """Which layers are gathered one by one: None for the usual choice, an empty list for the whole model at once.

    A layer that one rank runs and another skips would leave the other waiting in its gather. Hugging Face models run
    all their layers (but for layer drop), also inside of another module; of any other module this is known only when
    it says so itself, by `_no_split_modules`, the class names of its layers.
    """
    if is_hugging_face(model) or getattr(model, "_no_split_modules", None):
        if _drops_layers(model):
            return []
        return layers_of(model) if _has_another_forward(model) else None
    inner = [m for m in model.modules() if is_hugging_face(m)]
    nested = {id(m) for outer in inner for m in outer.modules() if m is not outer}
    outermost = [m for m in inner if id(m) not in nested and not _drops_layers(m)]
    return [layer for m in outermost for layer in layers_of(m)]


def _has_another_forward(model: nn.Module) -> bool:
    """Whether somebody has replaced the forward of a Hugging Face model, on the object or on its class.

    TRL and Liger do so for a fused loss, which reads the head's weight and never calls the head: gathered by itself, it
    would be a shard there, whose `full_tensor()` has a gradient that nobody adds up over the ranks.
    """
    for part in model.modules():
        if not is_hugging_face(part):
            continue
        owner = next(cls for cls in type(part).__mro__ if "forward" in vars(cls))
        if "forward" in vars(part) or vars(owner)["forward"].__module__ != owner.__module__:
            return True
    return False


def _drops_layers(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    return any(float(getattr(config, name, 0.0) or 0.0) > 0 for name in names)


def _check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        return
    other = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32}
    if other:
        found = other.pop()
        block = _BLOCKS.get(found)
        remedy = f'set "{block}": {{"enabled": true}}' if block else "convert the model with model.float()"
        raise UserError(
            f"model: the configuration trains in float32, but parameters are {str(found).removeprefix('torch.')}; "
            f"{remedy}" + (" or load the model in float32" if block else "")
        )


def _own_rows(param: torch.Tensor, rank: int, num_shards: int) -> torch.Tensor:
    """The rows that FSDP2 gives this rank: `torch.chunk` along dim 0, nothing on ranks beyond the last chunk."""
    chunks = torch.chunk(param, num_shards, dim=0)
    return chunks[rank] if rank < len(chunks) else param[:0]


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
