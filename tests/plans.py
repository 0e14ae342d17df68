"""A planner made of sizes alone, for tests of plans: no model, no process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from heavylift.memory.activations import LayerShape, Workload, backward_bytes, input_bytes, kept_bytes, loss_bytes
from heavylift.memory.peak import GroupLoad
from heavylift.memory.plan import MemoryPlan, make_plan
from heavylift.offload.options import TieredOptions
from heavylift.offload.tiers import aligned_bytes

GIB = 2**30
LLAMA_8B = LayerShape(32, 4096, 4096, 1024, 14336, 32, 128256)


@dataclass(frozen=True)
class ShapePlanner:
    """A model with untied ends, bfloat16, stage 3."""

    shape: LayerShape
    layer_numel: int
    num_shards: int

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    @property
    def shard_numel(self) -> int:
        """As `heavylift.memory.fit.Planner` has it."""
        return sum(load.shard_numel for load in self.loads(None))

    def loads(self, work: Workload | None) -> list[GroupLoad]:
        """The gather groups; with whole logits the loss is one of its own."""
        shape = self.shape
        ends = shape.vocab * shape.hidden
        loss = 0 if work is None else loss_bytes(shape, work, 2)
        chunked = work is None or work.chunk_tokens > 0
        found = [self._load("root", shape.hidden)]
        found.append(self._load("embed", ends, work=0 if work is None else input_bytes(shape, work, 2)))
        for layer in range(shape.num_layers):
            kept = needed = host = 0
            if work is not None:
                kept, needed = kept_bytes(shape, work, 2, layer), backward_bytes(shape, work, 2, layer)
                if work.inputs_on_host:
                    host = aligned_bytes(input_bytes(shape, work, 2), torch.uint8)
            found.append(self._load(f"layer {layer}", self.layer_numel, kept, needed, host))
        found.append(self._load("head", ends, work=loss if chunked else 0))
        return found if chunked else [*found, GroupLoad("loss", 0, 0, work_bytes=loss)]

    def _load(self, name: str, numel: int, kept: int = 0, work: int = 0, host: int = 0) -> GroupLoad:
        return GroupLoad(name, numel, -(-numel // self.num_shards), kept, work, host)

    def plan(self, options: TieredOptions, work: Workload | None) -> MemoryPlan:
        """As `heavylift.memory.fit.Planner` has it."""
        loads = self.loads(work)
        shards = sum(load.shard_numel for load in loads)
        return make_plan(loads, shards, options, stage=3, dtype=torch.bfloat16, num_shards=self.num_shards)


def llama_8b(num_shards: int) -> ShapePlanner:
    """Llama 3.1 8B."""
    return ShapePlanner(LLAMA_8B, 218_112_000, num_shards)
