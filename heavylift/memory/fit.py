"""`engine.ratio: auto`, and what else would fit where a plan does not.

`auto` leaves as many optimizer states on the device as its memory takes, to the element, and sends the rest to the
host. Both are decided by the plan alone, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.errors import UserError
from heavylift.memory.activations import Recompute, Workload
from heavylift.memory.machine import MachineMemory
from heavylift.memory.plan import MemoryPlan, host_floor_bytes
from heavylift.offload.options import TieredOptions
from heavylift.units import GIB

DEVICE_RESERVE_BYTES = GIB
"""Left free on the device: channels of NCCL, workspaces of cuBLAS and cuDNN, compiled kernels."""
STEP_SLACK = 0.05
"""...and this share of what a step takes, for what the allocator cannot fill."""
HOST_RESERVE_BYTES = 3 * GIB // 2
"""Left free on the host per process without a GPU: batches, the export's largest tensor. With one see
`heavylift.memory.plan.host_floor_bytes`."""
HOST_SLACK = 0.02
"""...and this share of the host's free memory."""


class Planner(Protocol):
    """Plans this process's memory for other options and another workload of the same sharded model."""

    @property
    def shard_numel(self) -> int:
        """Trainable elements of this process, padding included."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""

    def plan(self, options: TieredOptions, work: Workload | None) -> MemoryPlan:
        """The plan; without a workload no activations are counted."""


@dataclass(frozen=True)
class Setting:
    """What a plan follows from, beside the model."""

    options: TieredOptions
    work: Workload | None


@dataclass(frozen=True)
class Choice:
    """What `auto` came to."""

    ratio: float
    why: str
    """One line for the screen."""


def device_room(plan: MemoryPlan, machine: MachineMemory) -> int:
    """Device bytes that a run would leave free beyond the reserve; negative where it does not fit."""
    assert machine.device_available_bytes is not None
    reserve = DEVICE_RESERVE_BYTES + int(STEP_SLACK * plan.step_bytes)
    return machine.device_available_bytes - reserve - plan.device_bytes


def host_room(plan: MemoryPlan, machine: MachineMemory, local_world_size: int, *, spares: bool = True) -> int:
    """Host bytes that all processes of the machine would leave free, with `spares` beyond the reserve, else beyond what
    `check_plan` asks for."""
    has_device = machine.device_available_bytes is not None
    reserve = host_floor_bytes(machine, local_world_size)
    if spares:
        reserve += int(HOST_SLACK * machine.host_available_bytes)
        reserve += 0 if has_device else HOST_RESERVE_BYTES * local_world_size
    needed = plan.host_needed_bytes(local_world_size, has_device)
    return machine.host_available_bytes - reserve - needed


def fits(plan: MemoryPlan, machine: MachineMemory, local_world_size: int, *, spares: bool = True) -> bool:
    """Whether device and host take the plan, with `spares` with room to spare on the host too."""
    on_device = machine.device_available_bytes is None or device_room(plan, machine) >= 0
    return on_device and host_room(plan, machine, local_world_size, spares=spares) >= 0


def lowest_ratio(planner: Planner, setting: Setting, machine: MachineMemory) -> float:
    """The smallest share of the host with which the device's memory is enough, to the element; 1 where none is."""
    if machine.device_available_bytes is None:
        return 1.0
    total = planner.shard_numel
    if total == 0:
        return 0.0

    def takes(on_device: int) -> bool:
        placed = replace(setting.options, tier=Tier.HOST, ratio=(total - on_device) / total)
        return device_room(planner.plan(placed, setting.work), machine) >= 0

    return (total - _most(total, takes)) / total


def highest_ratio(
    planner: Planner, setting: Setting, machine: MachineMemory, local_world_size: int, *, spares: bool = True
) -> float:
    """The largest share of the host that its memory takes, to the element; 0 where it takes none."""
    total = planner.shard_numel

    def takes(on_host: int) -> bool:
        options = replace(setting.options, tier=Tier.HOST, ratio=on_host / total)
        return host_room(planner.plan(options, setting.work), machine, local_world_size, spares=spares) >= 0

    return _most(total, takes) / total if total else 1.0


def _most(total: int, takes: Callable[[int], bool]) -> int:
    """The largest number up to `total` that `takes` takes; 0 where it takes none. Whoever takes one takes less."""
    if takes(total):
        return total
    low, high = 0, total
    while high - low > 1:  # `high` is not taken, and `low`, but for 0, is
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    return low


def choose_ratio(planner: Planner, setting: Setting, machine: MachineMemory, local_world_size: int) -> Choice:
    """The ratio for `auto`. Raises UserError when device and host together do not hold the states."""
    if machine.device_available_bytes is None:
        return Choice(1.0, "engine.ratio: auto is 1.0: there is no accelerator whose memory could be filled")
    lowest = lowest_ratio(planner, setting, machine)
    highest = highest_ratio(planner, setting, machine, local_world_size)
    chosen = replace(setting.options, tier=Tier.HOST, ratio=lowest)
    plan = planner.plan(chosen, setting.work)
    device_gib, host_gib = machine.device_available_bytes / GIB, machine.host_available_bytes / GIB
    if lowest > highest or device_room(plan, machine) < 0:
        state_gib = planner.plan(replace(chosen, tier=Tier.DEVICE), None).device_state_bytes / GIB
        found = remedies(planner, setting, machine, local_world_size)
        raise UserError(
            f"engine.ratio: auto finds no place for the optimizer states ({local_world_size} x {state_gib:.1f} GiB): "
            f"the device would have to give away {lowest:.1%} of them ({device_gib:.1f} GiB are free), the host takes "
            f"{highest:.1%} ({host_gib:.1f} GiB are free); "
            + (f"what would fit: {', or '.join(found)}" if found else "use more GPUs or a smaller model")
        )
    why = (
        f"engine.ratio: auto is {lowest:.4f}: of {device_gib:.1f} GiB free on the device, a step and the parameters "
        f"take {(plan.param_bytes + plan.step_bytes) / GIB:.1f}, optimizer states {plan.device_state_bytes / GIB:.1f}; "
        f"{plan.host_state_bytes / GIB:.1f} GiB of states per process go to the host"
    )
    return Choice(lowest, why)


def remedies(planner: Planner, setting: Setting, machine: MachineMemory, local_world_size: int) -> list[str]:
    """Changes of the recipe, as `key=value` words, with each of which the run would fit; the smallest ones.

    First single changes; where no single one is enough, one combination; where none leaves room to spare on the
    host, what would just be let through.
    """
    for spares in (True, False):
        look = partial(_fitting, planner, machine=machine, local_world_size=local_world_size, spares=spares)
        found = [text for text in (look(*c) for c in _single_changes(setting, planner.dtype)) if text]
        if found:
            return _without_repeats(found)
        combined = (look(*c) for c in _combinations(setting, planner.dtype))
        first = next((text for text in combined if text), None)
        if first is not None:
            return [first]
    return []


def _fitting(
    planner: Planner,
    words: Sequence[str],
    setting: Setting,
    machine: MachineMemory,
    local_world_size: int,
    spares: bool,
) -> str | None:
    """The words of a change with which the run fits, a ratio added where it needs another one; else None."""
    if words and fits(planner.plan(setting.options, setting.work), machine, local_world_size, spares=spares):
        return " ".join(words)
    if machine.device_available_bytes is None:
        return None  # the ratio moves states within the same memory
    lowest = lowest_ratio(planner, setting, machine)
    highest = highest_ratio(planner, setting, machine, local_world_size, spares=spares)
    ratio = _round_between(lowest, highest)
    if ratio is None:
        return None
    options = replace(setting.options, tier=Tier.HOST, ratio=ratio)
    if not fits(planner.plan(options, setting.work), machine, local_world_size, spares=spares):
        return None
    tier = [] if setting.options.tier is Tier.HOST else ["engine.offload_optimizer=host"]
    return " ".join([*words, *tier, f"engine.ratio={ratio:g}"])


def _round_between(low: float, high: float) -> float | None:
    """A number of few digits in [low, high], nearer to `low`: less then has to cross the bus."""
    for digits in (2, 4):
        scale = 10**digits
        candidate = -int(-low * scale // 1) / scale
        if low <= candidate <= high:
            return float(candidate)
    return None


def _single_changes(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[list[str], Setting]]:
    yield [], setting  # another ratio alone
    yield from _exact(setting, dtype)
    work = setting.work
    if work is None:
        return
    yield from ((words, replace(setting, work=other)) for words, other in _recomputing(work))
    yield from ((words, replace(setting, work=other)) for words, other in _smaller(work))


def _combinations(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[list[str], Setting]]:
    for words, exact in _exact(setting, dtype):
        for more, both in _exact(exact, dtype):
            yield [*words, *more], both
            yield from (([*words, *more, *rest], other) for rest, other in _with_work(both))
        yield from (([*words, *rest], other) for rest, other in _with_work(exact))
    work = setting.work
    if work is None:
        return
    for words, other in _recomputing(work):
        for more, smaller in _smaller(other):
            yield [*words, *more], replace(setting, work=smaller)


def exact_changes(options: TieredOptions, dtype: torch.dtype) -> Iterator[tuple[str, str, TieredOptions]]:
    """Single options, as (name, value, all options with it), that take less memory for states, or keep gradients where
    there is room, with results that keep their bits. `dtype`: of the parameters."""
    if options.state_format is StateFormat.FP32 and dtype == torch.bfloat16:
        yield "state_format", "split", replace(options, state_format=StateFormat.SPLIT)
    if options.overlapped and options.gradients_on is Tier.HOST and not options.accumulate:
        yield "gradients_on", "device", replace(options, gradients_on=Tier.DEVICE)


def _exact(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[list[str], Setting]]:
    """`exact_changes` in the words of a recipe."""
    options = setting.options
    if options.tier is Tier.DEVICE:
        # as it would run on the host: `_fitting` adds the words for that
        options = replace(options, tier=Tier.HOST, schedule=Schedule.AUTO)
    for key, value, changed in exact_changes(options, dtype):
        yield [f"engine.{key}={value}"], replace(setting, options=replace(changed, tier=setting.options.tier))


def _with_work(setting: Setting) -> Iterator[tuple[list[str], Setting]]:
    """More computed again, or less at one time."""
    if setting.work is not None:
        for words, work in (*_recomputing(setting.work), *_smaller(setting.work)):
            yield words, replace(setting, work=work)


def _recomputing(work: Workload) -> Iterator[tuple[list[str], Workload]]:
    """More of the layers computed again, least change first."""
    full = replace(work, recompute=Recompute.FULL, recompute_every=1)
    words = ["train.gradient_checkpointing=true", *(["train.checkpoint_every=1"] if work.recompute_every > 1 else [])]
    if full != work:
        yield words, full
    else:
        words = []
    if not work.inputs_on_host:
        yield [*words, "train.cpu_checkpointing=true"], replace(full, inputs_on_host=True)


def _smaller(work: Workload) -> Iterator[tuple[list[str], Workload]]:
    """Smaller micro-batches, the largest first."""
    size = work.micro_batch // 2
    while size >= 1:
        yield [f"train.per_device_train_batch_size={size}"], replace(work, micro_batch=size)
        size //= 2


def _without_repeats(found: Sequence[str]) -> list[str]:
    """Drops what only adds to, or shrinks further than, something found before."""
    kept: list[str] = []
    for text in found:
        keys = {word.split("=")[0] for word in text.split()}
        if not any({word.split("=")[0] for word in other.split()} <= keys for other in kept):
            kept.append(text)
    return kept
