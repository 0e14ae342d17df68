"""Optimizer states of a group on their tiers: master, exp_avg, exp_avg_sq, flat, stored as `formats` says.

A group's flat layout is cut at most once: its front part lies on the device tier, the rest on the host tier. Each part
is stepped where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.config.schema import StateFormat, Tier
from heavylift.offload.formats import STORED_DTYPES, join_masters, low_halves, mark_signs_, rounds_up
from heavylift.offload.groups import Group, Segment
from heavylift.offload.noise import noise_of
from heavylift.offload.tensors import StepTensors
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
    state_format: StateFormat = StateFormat.FP32
    """How the three states are stored; `read` and `write` know."""

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

    def step_tensors(
        self, where: slice, grad: torch.Tensor, param_out: torch.Tensor, first: Segment, step: int
    ) -> StepTensors:
        """The states of a range of the part beside its gradient and where the new parameters go, flat and as long.

        `first`: the segment that lies at the beginning of the range (with `bf16` all over it); `step`: its count."""
        states = self.master[where], self.exp_avg[where], self.exp_avg_sq[where]
        noise = None
        if self.state_format is StateFormat.BF16:
            noise = noise_of(first.name, step, first.first + self.start + where.start - first.start)
        return StepTensors(*states, grad, param_out, self.state_format, noise)

    def read(self, name: str, segment: Segment) -> torch.Tensor:
        """A state of the segment's range in this part, float32, on the part's tier: a view where it is stored so."""
        where = self.overlap(segment)
        assert where is not None, f"{segment.name} does not reach into [{self.start}, {self.stop})"
        if self.state_format is StateFormat.SPLIT and name == "master":
            param = segment.shard()[self.overlap_in_segment(segment)].to(self.master.device)
            return join_masters(param, self.master[where], self.exp_avg_sq[where])
        stored = self._stored(name)[where]
        if self.state_format is StateFormat.SPLIT and name == "exp_avg_sq":
            return stored.abs()
        return stored.float()

    def write(self, name: str, segment: Segment, values: torch.Tensor) -> None:
        """Sets a state from `values`: the whole shard of the segment, flat, any float dtype and device. Who sets a
        master sets the parameter to its rounded value too."""
        where = self.overlap(segment)
        if where is None:
            return
        stored = self._stored(name)[where]
        new = values[self.overlap_in_segment(segment)].to(stored.device, torch.float32)
        if self.state_format is StateFormat.SPLIT and name == "master":
            stored.copy_(low_halves(new))
            mark_signs_(self.exp_avg_sq[where], rounds_up(new, new.to(torch.bfloat16)))
        elif self.state_format is StateFormat.SPLIT and name == "exp_avg_sq":
            stored.copy_(torch.copysign(new, stored))
        else:
            stored.copy_(new)

    def _stored(self, name: str) -> torch.Tensor:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[name]

    def read_master(self, segment: Segment) -> None:
        """Sets the master from the parameter: after loading weights, or whenever somebody else wrote them."""
        self.write("master", segment, segment.shard())


def host_state_bytes(
    num_elements: Sequence[int], accumulate: bool, state_format: StateFormat = StateFormat.FP32
) -> int:
    """Bytes of the host slab that holds the states of parts of these sizes: see `formats.state_bytes`; 4 more per
    element when accumulating."""
    dtypes = _part_dtypes(accumulate, state_format)
    return sum(aligned_bytes(numel, dtype) for numel in num_elements for dtype in dtypes)


def _part_dtypes(accumulate: bool, state_format: StateFormat) -> list[torch.dtype]:
    return [*STORED_DTYPES[state_format], *([torch.float32] if accumulate else [])]


def allocate_parts(
    groups: Sequence[Group],
    device_numels: Sequence[int],
    accumulate: bool,
    usage: TierUsage,
    state_format: StateFormat = StateFormat.FP32,
) -> tuple[list[list[Part]], HostSlab | None]:
    """Allocates and initialises the states: for each group its parts. Host states share one slab (not page-locked:
    only staging is copied over the bus)."""
    host_numels = [g.numel - n for g, n in zip(groups, device_numels, strict=True)]
    slab = None
    if any(host_numels):
        num_bytes = host_state_bytes([n for n in host_numels if n], accumulate, state_format)
        slab = HostSlab(num_bytes, pinned=False, usage=usage)
    dtypes = _part_dtypes(accumulate, state_format)
    result = []
    for group, device_numel in zip(groups, device_numels, strict=True):
        parts = []
        for tier, start, stop in ((Tier.DEVICE, 0, device_numel), (Tier.HOST, device_numel, group.numel)):
            if start == stop:
                continue
            if tier is Tier.HOST:
                assert slab is not None
                tensors = [slab.take(stop - start, dtype) for dtype in dtypes]
            else:
                tensors = [torch.zeros(stop - start, dtype=dtype, device=group.device) for dtype in dtypes]
                usage.device_bytes += sum(tensor.nbytes for tensor in tensors)
            master, exp_avg, exp_avg_sq, *rest = tensors
            accumulator = rest[0] if accumulate else None
            part = Part(group, tier, start, stop, master, exp_avg, exp_avg_sq, accumulator, state_format)
            # touch every page now: memory that is not there must fail before training, not at the first step
            for tensor in tensors:
                tensor.zero_()
            parts.append(part)
        result.append(parts)
    return result, slab
