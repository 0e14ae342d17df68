"""The plan of a sharded model, for any options and workload: which gather group is a layer, which the head.

The model may still be on the meta device.
"""

from __future__ import annotations

import torch
from torch import nn

from heavylift.memory.activations import LayerShape, Recompute, Workload, backward_bytes, input_bytes, kept_bytes
from heavylift.memory.activations import loss_bytes as bytes_of_loss
from heavylift.memory.peak import GroupLoad
from heavylift.memory.plan import MemoryPlan, make_plan
from heavylift.offload.groups import padded_numel
from heavylift.offload.optimizer import TieredOptions
from heavylift.offload.tiers import aligned_bytes
from heavylift.sharding import GatherGroup, ShardedModel


class ModelPlanner:
    """Plans the memory of this process."""

    def __init__(self, sharded: ShardedModel, shape: LayerShape | None, dtype: torch.dtype) -> None:
        """`shape`: None where the model's sizes are not known; then no activations are counted."""
        self._sharded = sharded
        self._shape = shape
        self._dtype = dtype
        self._ends = [_end(sharded.module, name) for name in ("get_input_embeddings", "get_output_embeddings")]

    @property
    def shard_numel(self) -> int:
        """Trainable elements of this process, padding included."""
        return sum(_shard_numel(group) for group in self._sharded.groups)

    def plan(self, options: TieredOptions, work: Workload | None) -> MemoryPlan:
        """The plan; without a workload, or where the model's sizes are not known, without activations."""
        sharded = self._sharded
        return make_plan(
            self.loads(work),
            sum(padded_numel(p) for group in sharded.groups for _, p in group.params),
            options,
            stage=sharded.stage,
            dtype=self._dtype,
            num_shards=sharded.mesh.size(sharded.mesh.ndim - 1),
        )

    def loads(self, work: Workload | None) -> list[GroupLoad]:
        """What each gather group means in one step, in forward order, and the loss where it is none's part."""
        found, layer = [], 0
        for index, group in enumerate(self._sharded.groups):
            is_layer = index > 0 and group.module not in self._ends
            found.append(self._load(group, work, layer if is_layer else None))
            layer += is_layer
        if self._shape is not None and work is not None and not self._loss_in_head(work):
            found.append(GroupLoad("loss", 0, 0, work_bytes=bytes_of_loss(self._shape, work, self._dtype.itemsize)))
        return found

    def _loss_in_head(self, work: Workload) -> bool:
        """Whether the loss is computed while the head, a group of its own, is gathered."""
        head = self._ends[1]
        return work.chunk_tokens > 0 and any(group.module is head for group in self._sharded.groups[1:])

    def _load(self, group: GatherGroup, work: Workload | None, layer: int | None) -> GroupLoad:
        num_params = sum(p.numel() for _, p in group.params)
        kept = needed = host = 0
        shape, itemsize = self._shape, self._dtype.itemsize
        if shape is not None and work is not None:
            if layer is not None:
                kept = kept_bytes(shape, work, itemsize, layer)
                needed = backward_bytes(shape, work, itemsize, layer)
                if work.inputs_on_host and work.recompute is not Recompute.NOTHING and work.recomputes(layer):
                    host = aligned_bytes(input_bytes(shape, work, itemsize), torch.uint8)
            elif group.module is self._ends[1] and self._loss_in_head(work):
                needed = bytes_of_loss(shape, work, itemsize)
            else:
                # the embedding's output has a gradient as large as itself
                needed = input_bytes(shape, work, itemsize)
        return GroupLoad(group.name, num_params, _shard_numel(group), kept, needed, host)


def _shard_numel(group: GatherGroup) -> int:
    return sum(padded_numel(p) for _, p in group.params if p.requires_grad)


def _end(model: nn.Module, getter: str) -> nn.Module | None:
    """The input or output embedding that a Hugging Face model names, None where it names none."""
    try:
        end = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return end if isinstance(end, nn.Module) else None
