"""The plan: bytes of every tier, decided and checked before anything is allocated.

Everything here follows from shapes, so it runs on the meta device. Parameters, optimizer states and staging are
exact. What one step adds on the device (gathered groups, gradients, activations) is an estimate that errs on the safe
side, see `heavylift.memory.peak` and `docs/memory.md`; of a model whose sizes are not known it is a lower bound,
without activations. Choosing the ratio, and what else would fit: `heavylift.memory.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from heavylift.config.schema import Tier
from heavylift.errors import UserError
from heavylift.memory.machine import MachineMemory, agree, measure
from heavylift.memory.peak import GroupLoad, find_peak
from heavylift.offload.options import TieredOptions
from heavylift.offload.overlap import MAX_COPYING, kept_gradient_bytes
from heavylift.offload.states import kept_dtypes, part_layout
from heavylift.offload.streamed import slot_bytes
from heavylift.offload.tiers import choose_streamed, least_streamed_share, place, whole_pages
from heavylift.units import GIB

HOST_PROCESS_BYTES = 5 * GIB // 2
"""What a process on a GPU takes on the host after the plan was made: driver, NCCL, the compiler with its workers, which
are processes of their own (`heavylift.launch.entry` bounds them), batches, the export's largest tensor."""
HOST_PROGRAMS_BYTES = 3 * GIB
"""...and once on a machine: pages of programs and libraries in use, which count as free memory (2.3 GiB seen), and the
launcher."""
HOST_FLOOR_SHARE = 0.1
"""...but not more than this share of the free memory: small runs take less."""
HOST_LEAST_BYTES = GIB
"""What must be left free of it in any case, once the states are there."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per process. `host` is CPU memory beside what the program itself needs."""

    param_bytes: int
    """Parameter shards, device."""
    grad_bytes: int
    """Reduced gradient shards at the worst moment, device."""
    device_state_bytes: int
    """Optimizer states (and accumulators) on the device tier."""
    gathered_bytes: int
    """Whole parameters and gradients, and the buffers of collectives, at the worst moment, device."""
    host_state_bytes: int
    """Optimizer states (and accumulators) on the host tier."""
    pinned_bytes: int
    """Staging between the tiers and layer inputs: host memory, page-locked when there is a GPU."""
    activation_bytes: int = 0
    """Activations at the worst moment, device; 0 where they are not known."""
    slot_bytes: int = 0
    """Room for states that pass through the device on their way, see `heavylift.offload.streamed`."""
    moment: str = ""
    """The worst moment of a step on the device."""
    without_effect: tuple[str, ...] = ()
    """Options that come to nothing with these sizes, each with why."""

    @property
    def step_bytes(self) -> int:
        """What a step takes on the device beside parameters and states."""
        return self.grad_bytes + self.gathered_bytes + self.activation_bytes

    @property
    def device_bytes(self) -> int:
        """All of the device tier at the worst moment."""
        return self.param_bytes + self.device_state_bytes + self.slot_bytes + self.step_bytes

    @property
    def host_bytes(self) -> int:
        """All of the host tier."""
        return self.host_state_bytes + self.pinned_bytes

    def host_needed_bytes(self, local_world_size: int, has_device: bool) -> int:
        """Host memory for all processes of the machine; without an accelerator the device tier lies there too.

        Of a step without an accelerator nothing is counted: what it takes there has not been measured.
        """
        own = self.host_bytes + (0 if has_device else self.param_bytes + self.device_state_bytes)
        return own * local_world_size

    def rows(self) -> list[tuple[str, Tier, int]]:
        """(what, tier, bytes) of everything that takes memory, for a table."""
        listed = [
            ("parameters", Tier.DEVICE, self.param_bytes),
            ("optimizer states", Tier.DEVICE, self.device_state_bytes),
            ("gradients", Tier.DEVICE, self.grad_bytes),
            ("gathered groups", Tier.DEVICE, self.gathered_bytes),
            ("activations", Tier.DEVICE, self.activation_bytes),
            ("slots of streamed states", Tier.DEVICE, self.slot_bytes),
            ("optimizer states", Tier.HOST, self.host_state_bytes),
            ("staging", Tier.HOST, self.pinned_bytes),
        ]
        return [row for row in listed if row[2] > 0]


def make_plan(
    loads: Sequence[GroupLoad],
    param_shards: int,
    options: TieredOptions,
    *,
    stage: int,
    dtype: torch.dtype,
    num_shards: int,
) -> MemoryPlan:
    """The plan of one process.

    `loads`: every gather group in forward order, the root first; `param_shards`: elements of all parameter shards of
    this process; `num_shards`: processes that a parameter is sharded over.
    """
    trained = [load for load in loads if load.shard_numel > 0]
    numels = [load.shard_numel for load in trained]
    device_numels = place(numels, options.ratio, options.tier)
    host_numels = [n - d for n, d in zip(numels, device_numels, strict=True)]
    chosen = choose_streamed(host_numels, options.streamed_share)
    by_cpu = [n for n, on_bus in zip(host_numels, chosen, strict=True) if n and not on_bus]
    streamed = [n for n, on_bus in zip(host_numels, chosen, strict=True) if n and on_bus]
    device_state_bytes, host_state_bytes = _state_bytes(trained, device_numels, chosen, options)
    pinned_bytes = sum(load.host_bytes for load in loads)
    ring_size = options.ring_size(by_cpu, streamed, dtype)
    if ring_size is not None:
        pinned_bytes += whole_pages(ring_size.num_bytes)
    if numels and options.keeps_gradients:
        pinned_bytes += whole_pages(kept_gradient_bytes(by_cpu, dtype, len(numels), options.gradients_on))
    # what the CPU steps leaves the device in backward, unless it shall not or a part of the group is stepped there
    stays = not options.overlapped or options.gradients_on is Tier.DEVICE
    waits = iter(
        not options.accumulate and (stays or on_device > 0 or on_bus)
        for on_device, on_bus in zip(device_numels, chosen, strict=True)
    )
    peak = find_peak(
        loads,
        itemsize=dtype.itemsize,
        num_shards=num_shards,
        stage=stage,
        waits=[load.shard_numel > 0 and next(waits) for load in loads],
        max_copying=0 if options.accumulate else MAX_COPYING,
        reduces_once=options.accumulate and stage < 2,
    )
    return MemoryPlan(
        param_bytes=param_shards * dtype.itemsize,
        grad_bytes=peak.grad_bytes,
        device_state_bytes=device_state_bytes,
        gathered_bytes=peak.gathered_bytes,
        host_state_bytes=host_state_bytes,
        slot_bytes=slot_bytes(streamed, kept_dtypes(options.accumulate, options.state_format)),
        pinned_bytes=pinned_bytes,
        activation_bytes=peak.activation_bytes,
        moment=peak.moment,
        without_effect=tuple(_without_effect(host_numels, chosen, options)),
    )


def _without_effect(host_numels: Sequence[int], streamed: Sequence[bool], options: TieredOptions) -> Iterator[str]:
    if options.streamed_share > 0 and any(host_numels) and not any(streamed):
        # rounded up, so that who types it gets what it says
        least = math.ceil(1e4 * least_streamed_share(host_numels)) / 1e4
        yield (
            f"streamed_share: without effect, as {options.streamed_share:g} of the host's states is less than any "
            f"group of them; from {least:g} on something is streamed"
        )


def _state_bytes(
    loads: Sequence[GroupLoad], device_numels: Sequence[int], streamed: Sequence[bool], options: TieredOptions
) -> tuple[int, int]:
    """Optimizer states and accumulators on the device and on the host, of groups cut there: on the host in one slab for
    those that are streamed and one for the others."""
    on_device, on_host = 0, {False: 0, True: 0}
    for load, cut, on_bus in zip(loads, device_numels, streamed, strict=True):
        numels = load.segment_numels or (load.shard_numel,)
        assert sum(numels) == load.shard_numel, f"{load.name}: {numels=} {load.shard_numel=}"
        front, rest = (
            part_layout(numels, start, stop, options.accumulate, options.state_format)
            for start, stop in ((0, cut), (cut, load.shard_numel))
        )
        on_device += front.device_bytes
        on_host[on_bus] += rest.host_bytes
    return on_device, sum(whole_pages(num_bytes) for num_bytes in on_host.values() if num_bytes)


def host_floor_bytes(machine: MachineMemory, local_world_size: int) -> int:
    """Host bytes that programs on a GPU take beside the plan, for all processes of the machine; 0 without a GPU.

    With less the kernel takes the pages of the programs themselves, again and again, and training stands still without
    a word.
    """
    if machine.device_available_bytes is None:
        return 0
    floor = HOST_PROGRAMS_BYTES + HOST_PROCESS_BYTES * local_world_size
    return min(floor, int(HOST_FLOOR_SHARE * machine.host_available_bytes))


def check_plan(
    plan: MemoryPlan,
    machine: MachineMemory,
    local_world_size: int,
    options: TieredOptions,
    remedies: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Raises UserError, saying what would fit, when the plan does not fit the machine.

    `remedies`: changes of the recipe that would fit, asked for only then (`heavylift.memory.fit.remedies`).
    """
    problems = []
    has_device = machine.device_available_bytes is not None
    host_needed = plan.host_needed_bytes(local_world_size, has_device)
    besides = host_floor_bytes(machine, local_world_size) if host_needed > 0 else 0
    if host_needed + besides > machine.host_available_bytes:
        what = "the optimizer states" if has_device else "parameters and optimizer states"
        programs = f" and the programs {besides / GIB:.1f}" if besides else ""
        problems.append(
            f"host memory: {what} need {host_needed / GIB:.1f} GiB on this machine "
            f"({local_world_size} x {host_needed / local_world_size / GIB:.1f}){programs}, "
            f"{machine.host_available_bytes / GIB:.1f} GiB are free"
        )
    if machine.device_available_bytes is not None and plan.device_bytes > machine.device_available_bytes:
        parts = ", ".join(f"{what} {size / GIB:.1f}" for what, tier, size in plan.rows() if tier is Tier.DEVICE)
        lacking = "" if plan.activation_bytes else " before any activation"
        problems.append(
            f"device memory: {plan.device_bytes / GIB:.1f} GiB are needed{lacking} ({parts}), "
            f"{machine.device_available_bytes / GIB:.1f} GiB are free"
        )
    if problems:
        hint = _hint(list(remedies()) if remedies is not None else [], has_device)
        raise UserError(*(f"{problem}; {hint}" for problem in problems))


def check_left(left_bytes: int, plan: MemoryPlan, local_world_size: int, remedy: str) -> None:
    """Raises UserError when hardly any host memory is left beside the states, which have been allocated beside a GPU:
    something else has taken what the plan had found free. `remedy`: which key to lower."""
    taken = plan.host_bytes * local_world_size
    if taken == 0 or left_bytes >= min(HOST_LEAST_BYTES, (taken + left_bytes) // 20):
        return
    raise UserError(
        f"host memory: {left_bytes / GIB:.2f} GiB are left beside {taken / GIB:.1f} of optimizer states: programs "
        f"would stand still for want of it; {remedy}, or end what else takes memory on this machine"
    )


def check_left_on(device: torch.device, plan: MemoryPlan, local_world_size: int, ratio: float, key: str) -> None:
    """`check_left` with what this machine has free now. A collective on GPUs; elsewhere nothing is checked. `key`: what
    sets `ratio`, for the message."""
    if device.type == "cuda":
        left_bytes = agree(measure(device), device).host_available_bytes
        check_left(left_bytes, plan, local_world_size, f"lower {key}, which is {ratio:g}")


def _hint(found: Sequence[str], has_device: bool) -> str:
    if not found:
        return f"use {'more GPUs, ' if has_device else ''}a smaller model or a machine with more memory"
    return f"what would fit: {', or '.join(found)}"
