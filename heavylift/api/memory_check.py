"""`initialize()` refuses optimizer states that do not fit, before any of them is allocated.

What a step of a script takes (activations, its own tensors) is not known here and not counted.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from heavylift.config.schema import Tier
from heavylift.memory.fit import Setting, fits, highest_ratio
from heavylift.memory.machine import agree, measure
from heavylift.memory.plan import MemoryPlan, check_plan
from heavylift.memory.planner import ModelPlanner
from heavylift.offload.optimizer import TieredOptions
from heavylift.ranks import Ranks
from heavylift.sharding import ShardedModel

_OFFLOAD = "zero_optimization.offload_optimizer"


class _StatesPlanner(ModelPlanner):
    """Plans what is still to be allocated: the parameters have their memory already."""

    def plan(self, options: TieredOptions, work: object = None) -> MemoryPlan:
        return replace(super().plan(options, None), param_bytes=0)


def check_memory(sharded: ShardedModel, dtype: torch.dtype, options: TieredOptions, ranks: Ranks) -> None:
    """A collective. Raises UserError on every rank, with the keys that would help, where states do not fit."""
    planner = _StatesPlanner(sharded, None, dtype)
    machine, local = agree(measure(ranks.device), ranks.device), ranks.local_world_size

    def remedies() -> list[str]:
        to_host = replace(options, tier=Tier.HOST, ratio=1.0)
        found = []
        if options.tier is Tier.DEVICE:
            if machine.device_available_bytes is not None and fits(planner.plan(to_host), machine, local):
                found.append(f'{_OFFLOAD}.device "cpu"')
            return found
        # rounded down to what somebody would type
        ratio = int(100 * highest_ratio(planner, Setting(to_host, None), machine, local)) / 100
        if ratio > 0 and fits(planner.plan(replace(to_host, ratio=ratio)), machine, local):
            found.append(f"{_OFFLOAD}.ratio {ratio}")
        return found

    check_plan(planner.plan(options), machine, local, options, remedies)
