"""The plan of a sharded model, for any options and workload: which gather group is a layer, which the head.

The model may still be on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from heavylift.memory.activations import LayerShape, Workload, backward_bytes, input_bytes, kept_bytes, loss_bytes
from heavylift.memory.peak import GroupLoad
from heavylift.memory.plan import MemoryPlan, make_plan
from heavylift.offload.groups import padded_numel
from heavylift.offload.options import TieredOptions
from heavylift.offload.tiers import aligned_bytes
from heavylift.sharding import ShardedModel


class _Role(Enum):
    """What of a workload falls into a group."""

    ROOT = "root"
    LAYER = "layer"
    HEAD = "head"
    OTHER = "other"


@dataclass(frozen=True)
class _Sizes:
    """A gather group, without its parameters: looked up once, planned with many times."""

    name: str
    role: _Role
    layer: int
    """Its number among the layers."""
    num_params: int
    segment_numels: tuple[int, ...]

    @property
    def shard_numel(self) -> int:
        """Trainable elements of this process, padding included."""
        return sum(self.segment_numels)


class ModelPlanner:
    """Plans the memory of this process."""

    def __init__(self, sharded: ShardedModel, shape: LayerShape | None, dtype: torch.dtype) -> None:
        """`shape`: None where the model's sizes are not known; then no activations are counted."""
        self._shape = shape
        self.dtype = dtype
        self._stage = sharded.stage
        self._num_shards = sharded.mesh.size(sharded.mesh.ndim - 1)
        self._param_shards = sum(padded_numel(p) for group in sharded.groups for _, p in group.params)
        self._groups = _sizes(sharded)

    @property
    def shard_numel(self) -> int:
        """Trainable elements of this process, padding included."""
        return sum(group.shard_numel for group in self._groups)

    def plan(self, options: TieredOptions, work: Workload | None) -> MemoryPlan:
        """The plan; without a workload, or where the model's sizes are not known, without activations."""
        return make_plan(
            self.loads(work),
            self._param_shards,
            options,
            stage=self._stage,
            dtype=self.dtype,
            num_shards=self._num_shards,
        )

    def loads(self, work: Workload | None) -> list[GroupLoad]:
        """What each gather group means in one step, in forward order, and the loss where it is no group's part."""
        if self._shape is None or work is None:
            return [
                GroupLoad(g.name, g.num_params, g.shard_numel, segment_numels=g.segment_numels) for g in self._groups
            ]
        # in chunks the loss is computed while the head is gathered
        in_head = work.chunk_tokens > 0 and any(group.role is _Role.HEAD for group in self._groups)
        found = [self._load(group, self._shape, work, in_head) for group in self._groups]
        if not in_head:
            found.append(GroupLoad("loss", 0, 0, work_bytes=loss_bytes(self._shape, work, self.dtype.itemsize)))
        return found

    def _load(self, group: _Sizes, shape: LayerShape, work: Workload, loss_in_head: bool) -> GroupLoad:
        kept = host = 0
        itemsize = self.dtype.itemsize
        # the output of the embedding, or of whatever else it is, has a gradient as large as itself
        needed = input_bytes(shape, work, itemsize)
        if group.role is _Role.LAYER:
            kept = kept_bytes(shape, work, itemsize, group.layer)
            needed = backward_bytes(shape, work, itemsize, group.layer)
            if work.inputs_on_host and work.recomputes(group.layer):
                host = aligned_bytes(input_bytes(shape, work, itemsize), torch.uint8)
        elif group.role is _Role.HEAD and loss_in_head:
            needed = loss_bytes(shape, work, itemsize)
        return GroupLoad(group.name, group.num_params, group.shard_numel, kept, needed, host, group.segment_numels)


def _sizes(sharded: ShardedModel) -> list[_Sizes]:
    """All gather groups in forward order, the root first."""
    ends = {_end(sharded.module, "get_input_embeddings"): _Role.OTHER}
    ends[_end(sharded.module, "get_output_embeddings")] = _Role.HEAD
    found, layer = [], 0
    for index, group in enumerate(sharded.groups):
        role = _Role.ROOT if index == 0 else ends.get(group.module, _Role.LAYER)
        num_params = sum(p.numel() for _, p in group.params)
        segment_numels = tuple(padded_numel(p) for _, p in group.params if p.requires_grad)
        found.append(_Sizes(group.name, role, layer, num_params, segment_numels))
        layer += role is _Role.LAYER
    return found


def _end(model: nn.Module, getter: str) -> nn.Module | None:
    """The input or output embedding that a Hugging Face model names, None where it names none."""
    try:
        end = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return end if isinstance(end, nn.Module) else None
