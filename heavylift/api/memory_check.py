"""`initialize()` refuses optimizer states that do not fit, before any of them is allocated.

What a step of a script takes (activations, its own tensors) is not known here and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch

from heavylift.config.schema import Schedule, Tier
from heavylift.memory.fit import Setting, exact_changes, fits, highest_ratio
from heavylift.memory.machine import MachineMemory, agree, measure
from heavylift.memory.plan import MemoryPlan, check_plan
from heavylift.memory.planner import ModelPlanner
from heavylift.offload.options import TieredOptions
from heavylift.ranks import Ranks
from heavylift.sharding import ShardedModel

OFFLOAD = "zero_optimization.offload_optimizer"


class _StatesPlanner(ModelPlanner):
    """Plans what is still to be allocated: the parameters have their memory already."""

    def plan(self, options: TieredOptions, work: object = None) -> MemoryPlan:
        return replace(super().plan(options, None), param_bytes=0)


@dataclass(frozen=True)
class _Change:
    """Keys of a ds_config changed together, and the options that they make."""

    words: tuple[str, ...]
    options: TieredOptions


def check_memory(sharded: ShardedModel, dtype: torch.dtype, options: TieredOptions, ranks: Ranks) -> MemoryPlan:
    """The plan of the states. A collective. Raises UserError on every rank, with the keys that would help, where they
    do not fit."""
    planner = _StatesPlanner(sharded, None, dtype)
    machine, local = agree(measure(ranks.device), ranks.device), ranks.local_world_size
    plan = planner.plan(options)
    check_plan(plan, machine, local, options, lambda: _remedies(planner, options, machine, local))
    return plan


def _remedies(planner: _StatesPlanner, options: TieredOptions, machine: MachineMemory, local: int) -> list[str]:
    """Single changes with each of which the states fit; where there are none, the first combination, one without
    another ratio before one with it."""

    def takes(change: _Change) -> bool:
        return fits(planner.plan(change.options), machine, local)

    single = [*_to_host(options, machine), *_exact(options, planner.dtype)]
    found = [change for change in single if takes(change)]
    ratio = _with_ratio(_Change((), options), planner, machine, local) if options.tier is Tier.HOST else None
    if ratio is not None:
        found.insert(0, ratio)
    if found:
        return [" and ".join(change.words) for change in found]
    combined = list(_combined(options, planner.dtype, machine))
    on_host = [change for change in combined if change.options.tier is Tier.HOST]
    as_is = (change if takes(change) else None for change in combined)
    candidates = chain(as_is, (_with_ratio(change, planner, machine, local) for change in on_host))
    first = next((change for change in candidates if change is not None), None)
    return [] if first is None else [" and ".join(first.words)]


def _to_host(options: TieredOptions, machine: MachineMemory) -> Iterator[_Change]:
    if options.tier is Tier.DEVICE and machine.device_available_bytes is not None:
        # with the schedule that runs there when nothing else is asked for
        moved = replace(options, tier=Tier.HOST, ratio=1.0, schedule=Schedule.AUTO)
        yield _Change((f'{OFFLOAD}.device "cpu"',), moved)


def _exact(options: TieredOptions, dtype: torch.dtype) -> Iterator[_Change]:
    """`exact_changes` in the words of a ds_config."""
    for key, value, changed in exact_changes(options, dtype):
        yield _Change((f'heavylift.{key} "{value}"',), changed)


def _combined(options: TieredOptions, dtype: torch.dtype, machine: MachineMemory) -> Iterator[_Change]:
    """Changes that may be tried with another ratio too, fewest first."""
    for start in [*_to_host(options, machine), _Change((), options)]:
        if start.words:
            yield start
        for change in _exact(start.options, dtype):
            words = (*start.words, *change.words)
            yield _Change(words, change.options)
            for more in _exact(change.options, dtype):
                yield _Change((*words, *more.words), more.options)


def _with_ratio(change: _Change, planner: _StatesPlanner, machine: MachineMemory, local: int) -> _Change | None:
    """The change with the highest ratio that the host takes, rounded down to what somebody would type: activations are
    not known, so that the device keeps as much room as can be. None where that does not fit."""
    ratio = int(100 * highest_ratio(planner, Setting(change.options, None), machine, local)) / 100
    options = replace(change.options, ratio=ratio)
    if ratio == 0 or not fits(planner.plan(options), machine, local):
        return None
    return _Change((*change.words, f"{OFFLOAD}.ratio {ratio}"), options)
