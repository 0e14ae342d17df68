"""Stepping one part of a group where it lies, and bringing the updated shard home.

Shared by the synchronous step and by the overlapped schedules: they differ in who calls this, and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.groups import Segment
from heavylift.offload.kernels import Kernel
from heavylift.offload.staging import Slot, StagingRing
from heavylift.offload.states import Part
from heavylift.offload.tensors import StepTensors
from heavylift.offload.timeline import Activity, Timeline


class Operation(StrEnum):
    """What is done to the states of a part."""

    STEP = "step"
    CORRECT = "correct"
    """Turn a step with the whole gradient into one with `coefficient` times it."""
    UNDO = "undo"
    """Take a step back."""


def apply(operation: Operation, kernel: Kernel, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
    """Has the kernel do the operation. `coefficient`: of a correction."""
    if operation is Operation.STEP:
        kernel.step(tensors, hyper)
    elif operation is Operation.CORRECT:
        kernel.correct(tensors, hyper, coefficient)
    else:
        kernel.undo(tensors, hyper)


@dataclass(frozen=True)
class SegmentStep:
    """A segment that takes part in a step, with the hyperparameters of this very step."""

    segment: Segment
    hyper: AdamWHyper


def scaled(steps: Sequence[SegmentStep], coefficient: float) -> list[SegmentStep]:
    """The same steps with the clipping coefficient in their gradient scale."""
    if coefficient == 1.0:
        return list(steps)
    return [replace(s, hyper=replace(s.hyper, grad_scale=s.hyper.grad_scale * coefficient)) for s in steps]


class Streams:
    """Side streams for the two directions of the bus; None on a machine without CUDA, where copies are immediate.

    Made once: new streams per step would grow the allocator's pools.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.d2h = torch.cuda.Stream(device) if is_cuda else None
        self.h2d = torch.cuda.Stream(device) if is_cuda else None

    def d2h_after_current(self) -> None:
        """The copies down begin after what has been issued on the current stream."""
        if self.d2h is not None:
            self.d2h.wait_stream(torch.cuda.current_stream(self.device))

    def h2d_after_current(self) -> None:
        """The copies up, which overwrite shards, begin after what has been issued on the current stream."""
        if self.h2d is not None:
            self.h2d.wait_stream(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Blocks until all copies are done: before their host memory is unlocked."""
        for stream in (self.d2h, self.h2d):
            if stream is not None:
                stream.synchronize()


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Context of a stream, or none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event behind what has been issued on the stream."""
    return None if stream is None else stream.record_event()


class PartStepper:
    """Steps parts with the kernel of their tier."""

    def __init__(
        self, host: Kernel, device: Kernel, ring: StagingRing | None, streams: Streams, timeline: Timeline
    ) -> None:
        self.host = host
        self.device = device
        self.ring = ring
        self.streams = streams
        self.timeline = timeline

    def step_device_part(self, part: Part, steps: Sequence[SegmentStep], grads: torch.Tensor | None = None) -> None:
        """On the current stream, in place. `grads`: the group's flat gradient; None: `param.grad` or accumulator."""
        for step in steps:
            where = part.overlap(step.segment)
            if where is None:
                continue
            inside = part.overlap_in_segment(step.segment)
            if part.accumulator is not None:
                grad = part.accumulator[where]
            elif grads is not None:
                grad = grads[part.start + where.start : part.start + where.stop]
            else:
                whole = step.segment.grad()
                assert whole is not None, f"{step.segment.name} has no gradient"
                grad = whole[inside]
            param = step.segment.shard()[inside]
            self.device.step(part.step_tensors(where, grad, param, step.segment, step.hyper.step), step.hyper)

    def step_host_part(
        self,
        part: Part,
        steps: Sequence[SegmentStep],
        grads_host: torch.Tensor,
        operation: Operation = Operation.STEP,
        coefficient: float = 1.0,
    ) -> None:
        """On the CPU; the updated shard goes up on the H2D stream and the group's gate opens behind it.

        grads_host: flat [part.numel], float32 or the parameters' dtype, already there. May run on any thread.
        """
        assert self.ring is not None
        name = part.group.name
        with self.timeline.measure(Activity.SLOT, name):
            slot = self.ring.next_slot()
        if part.state_format is StateFormat.SPLIT:
            self._params_to_slot(part, steps, slot)
        with self.timeline.measure(Activity.ADAMW, name if operation is Operation.STEP else f"{name} ({operation})"):
            for run, first in runs(part, steps):
                hyper = first.hyper
                tensors = part.step_tensors(run, grads_host[run], slot.param_host[run], first.segment, hyper.step)
                apply(operation, self.host, tensors, hyper, coefficient)
            if grads_host is part.accumulator:
                # before the gate opens: the next backward adds to it
                grads_host.zero_()
        with self.timeline.measure(Activity.ISSUE, name), on_stream(self.streams.h2d):
            for step in steps:
                where = part.overlap(step.segment)
                if where is not None:
                    shard = step.segment.shard()[part.overlap_in_segment(step.segment)]
                    shard.copy_(slot.param_host[where], non_blocking=True)
        slot.free_event = record(self.streams.h2d)
        part.group.gate.open(slot.free_event)

    def _params_to_slot(self, part: Part, steps: Sequence[SegmentStep], slot: Slot) -> None:
        """Brings the parameters, which are half of split masters, down to where the kernel writes their new values, and
        waits for them."""
        streams = self.streams
        if streams.d2h is not None and streams.h2d is not None:
            streams.d2h.wait_stream(streams.h2d)  # a step that is now revised may still be on its way up
        with self.timeline.measure(Activity.FETCH, f"{part.group.name} (parameters)"):
            with on_stream(streams.d2h):
                for step in steps:
                    where = part.overlap(step.segment)
                    if where is not None:
                        shard = step.segment.shard()[part.overlap_in_segment(step.segment)]
                        slot.param_host[where].copy_(shard, non_blocking=True)
            if streams.d2h is not None:
                streams.d2h.record_event().synchronize()


def runs(part: Part, steps: Sequence[SegmentStep]) -> Iterator[tuple[slice, SegmentStep]]:
    """Neighbouring segments with the same hyperparameters as one range, with the first of their steps: fewer, longer
    kernel calls. Segment by segment where each has noise of its own."""
    run: slice | None = None
    first: SegmentStep | None = None
    merges = part.state_format.is_exact
    for step in steps:
        where = part.overlap(step.segment)
        if where is None:
            continue
        if merges and run is not None and first is not None and run.stop == where.start and step.hyper == first.hyper:
            run = slice(run.start, where.stop)
            continue
        if run is not None and first is not None:
            yield run, first
        run, first = where, step
    if run is not None and first is not None:
        yield run, first
