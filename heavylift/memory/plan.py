"""The plan: bytes of every tier, decided and checked before anything is allocated.

Everything here follows from shapes, so it runs on the meta device. What is exact: parameters, gradients, optimizer
states, staging. Left out: activations and the allocator's fragmentation, which depend on the model's code; the device
total is therefore a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.config.schema import Tier
from heavylift.errors import UserError
from heavylift.memory.machine import MachineMemory
from heavylift.offload.groups import Group
from heavylift.offload.optimizer import NUM_STAGING_SLOTS, TieredOptions
from heavylift.offload.overlap import kept_gradient_bytes
from heavylift.offload.staging import StagingRing
from heavylift.offload.states import STATE_NAMES, host_state_bytes
from heavylift.offload.tiers import place, whole_pages

GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per process. `host` is CPU memory beside what the program itself needs."""

    param_bytes: int
    """Parameter shards, device."""
    grad_bytes: int
    """Reduced gradient shards, device."""
    device_state_bytes: int
    """Optimizer states (and accumulators) on the device tier."""
    gathered_bytes: int
    """Whole parameters and gradients of the groups that are gathered at once, device."""
    host_state_bytes: int
    """Optimizer states (and accumulators) on the host tier."""
    pinned_bytes: int
    """Staging between the tiers: host memory, page-locked when there is a GPU."""

    @property
    def device_bytes(self) -> int:
        """All of the device tier, activations excepted."""
        return self.param_bytes + self.grad_bytes + self.device_state_bytes + self.gathered_bytes

    @property
    def host_bytes(self) -> int:
        """All of the host tier."""
        return self.host_state_bytes + self.pinned_bytes


def make_plan(
    groups: Sequence[Group],
    group_params: Sequence[int],
    param_shards: int,
    options: TieredOptions,
    *,
    stage: int,
    dtype: torch.dtype,
) -> MemoryPlan:
    """The plan of one process.

    `groups`: the trainable gather groups in forward order; `group_params`: parameters of every gather group, whole
    (frozen ones too); `param_shards`: elements of all parameter shards of this process.
    """
    numels = [group.numel for group in groups]
    device_numels = place(numels, options.ratio, options.tier)
    host_numels = [n - d for n, d in zip(numels, device_numels, strict=True) if n > d]
    pinned_bytes = 0
    if host_numels:
        grad_dtype = options.staging_grad_dtype(dtype)
        pinned_bytes = whole_pages(StagingRing.num_bytes(NUM_STAGING_SLOTS, max(host_numels), dtype, grad_dtype))
    if host_numels and options.keeps_gradients:
        pinned_bytes += whole_pages(kept_gradient_bytes(host_numels, dtype, len(groups)))
    # stage 3 holds the group at work and the one fetched ahead; below it, all
    gathered = sum(group_params) if stage < 3 else sum(sorted(group_params)[-2:])
    return MemoryPlan(
        param_bytes=param_shards * dtype.itemsize,
        grad_bytes=0 if options.accumulate else sum(numels) * dtype.itemsize,
        device_state_bytes=(len(STATE_NAMES) + options.accumulate) * 4 * sum(device_numels),
        gathered_bytes=gathered * dtype.itemsize + max(group_params, default=0) * (dtype.itemsize + 4),
        host_state_bytes=whole_pages(host_state_bytes(host_numels, options.accumulate)) if host_numels else 0,
        pinned_bytes=pinned_bytes,
    )


def check_plan(plan: MemoryPlan, machine: MachineMemory, local_world_size: int, options: TieredOptions) -> None:
    """Raises UserError, saying what would fit, when the plan does not fit the machine."""
    problems = []
    host_needed = plan.host_bytes * local_world_size
    if host_needed > machine.host_available_bytes:
        fits = machine.host_available_bytes / host_needed * options.ratio
        remedy = (
            f"set engine.ratio to {fits:.2f} or less (the rest then needs device memory)"
            if options.tier is Tier.HOST and fits >= 0.01
            else "use a smaller model or more memory"
        )
        problems.append(
            f"host memory: the optimizer states need {host_needed / GIB:.1f} GiB on this machine "
            f"({local_world_size} x {plan.host_bytes / GIB:.1f}), {machine.host_available_bytes / GIB:.1f} GiB are "
            f"free; {remedy}"
        )
    if machine.device_available_bytes is not None and plan.device_bytes > machine.device_available_bytes:
        remedies = ["more GPUs"]
        if plan.device_state_bytes:
            remedies.insert(0, "engine.offload_optimizer=host")
        problems.append(
            f"device memory: parameters, gradients and states need {plan.device_bytes / GIB:.1f} GiB before any "
            f"activation, {machine.device_available_bytes / GIB:.1f} GiB are free; try {' or '.join(remedies)}"
        )
    if problems:
        raise UserError(*problems)
