"""Optimizer states of a group on their tiers: master, exp_avg, exp_avg_sq, flat float32.

A group's flat layout is cut at most once: its front part lies on the device tier, the rest on the host tier. Each part
is stepped where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.config.schema import Tier
from heavylift.offload.adamw import StepTensors
from heavylift.offload.groups import Group, Segment
from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class Part:
    """The range [start, stop) of a group's flat layout, with its states on one tier."""

    group: Group
    tier: Tier
    start: int
    stop: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    accumulator: torch.Tensor | None
    """Sum of the reduced gradients of the micro-batches, float32; None without gradient accumulation."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return self.stop - self.start

    def overlap(self, segment: Segment) -> slice | None:
        """Where `segment` lies in this part's own tensors, None if it does not."""
        start, stop = max(segment.start, self.start), min(segment.stop, self.stop)
        return slice(start - self.start, stop - self.start) if start < stop else None

    def overlap_in_segment(self, segment: Segment) -> slice:
        """The same range, counted from the start of the segment."""
        where = self.overlap(segment)
        assert where is not None, f"{segment.name} does not reach into [{self.start}, {self.stop})"
        offset = self.start - segment.start
        return slice(where.start + offset, where.stop + offset)

    def step_tensors(self, where: slice, grad: torch.Tensor, param_out: torch.Tensor) -> StepTensors:
        """The states of a range of the part beside its gradient and where the new parameters go, flat and as long."""
        return StepTensors(self.master[where], self.exp_avg[where], self.exp_avg_sq[where], grad, param_out)

    def read_master(self, segment: Segment) -> None:
        """Sets the master from the parameter: after loading weights, or whenever somebody else wrote them."""
        where = self.overlap(segment)
        if where is not None:
            self.master[where].copy_(segment.shard()[self.overlap_in_segment(segment)])


def host_state_bytes(num_elements: Sequence[int], accumulate: bool) -> int:
    """Bytes of the host slab that holds the states of parts of these sizes (12 per element, 16 when accumulating)."""
    tensors = len(STATE_NAMES) + accumulate
    return sum(tensors * aligned_bytes(numel, torch.float32) for numel in num_elements)


def allocate_parts(
    groups: Sequence[Group], device_numels: Sequence[int], accumulate: bool, usage: TierUsage
) -> tuple[list[list[Part]], HostSlab | None]:
    """Allocates and initialises the states: for each group its parts. Host states share one slab (not page-locked:
    only staging is copied over the bus)."""
    host_numels = [g.numel - n for g, n in zip(groups, device_numels, strict=True)]
    slab = None
    if any(host_numels):
        slab = HostSlab(host_state_bytes([n for n in host_numels if n], accumulate), pinned=False, usage=usage)
    num_tensors = len(STATE_NAMES) + accumulate
    result = []
    for group, device_numel in zip(groups, device_numels, strict=True):
        parts = []
        for tier, start, stop in ((Tier.DEVICE, 0, device_numel), (Tier.HOST, device_numel, group.numel)):
            if start == stop:
                continue
            if tier is Tier.HOST:
                assert slab is not None
                tensors = [slab.take(stop - start, torch.float32) for _ in range(num_tensors)]
            else:
                tensors = [
                    torch.zeros(stop - start, dtype=torch.float32, device=group.device) for _ in range(num_tensors)
                ]
                usage.device_bytes += num_tensors * (stop - start) * 4
            master, exp_avg, exp_avg_sq, *rest = tensors
            part = Part(group, tier, start, stop, master, exp_avg, exp_avg_sq, rest[0] if accumulate else None)
            # touch every page now: memory that is not there must fail before training, not at the first step
            for tensor in tensors:
                tensor.zero_()
            parts.append(part)
        result.append(parts)
    return result, slab
