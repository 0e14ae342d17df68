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

PIECE_NUMEL = 2**23
"""Elements whose new parameters go up while the next are computed: copies of a third of a millisecond, ten times as
long apart. A copy engine serves one stream until nothing more of it is ready, and FSDP2's small tables for gathering
and scattering go up in the compute stream: a whole group's copies in one go made it stand still for 3 to 15 ms each."""


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


def clipped(hyper: AdamWHyper, coefficient: float) -> AdamWHyper:
    """With the clipping coefficient in the gradient scale."""
    return hyper if coefficient == 1.0 else replace(hyper, grad_scale=hyper.grad_scale * coefficient)


def scaled(steps: Sequence[SegmentStep], coefficient: float) -> list[SegmentStep]:
    """The same steps with the clipping coefficient in their gradient scale."""
    if coefficient == 1.0:
        return list(steps)
    # most of hundreds of segments have the same ones
    of = {hyper: clipped(hyper, coefficient) for hyper in {s.hyper for s in steps}}
    return [SegmentStep(s.segment, of[s.hyper]) for s in steps]


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

    def step_host_part(
        self,
        part: Part,
        steps: Sequence[SegmentStep],
        grads_host: torch.Tensor,
        operation: Operation = Operation.STEP,
        coefficient: float = 1.0,
        slot: Slot | None = None,
    ) -> None:
        """On the CPU; each piece goes up on the H2D stream at once, and the group's gate opens behind the last.

        grads_host: flat [part.numel], float32 or the parameters' dtype, already there. `slot`: of the ring, with the
        parameters in it where the states are `split`; None: it is taken here. May run on any thread.
        """
        assert self.ring is not None
        name = part.group.name
        label = name if operation is Operation.STEP else f"{name} ({operation})"
        if slot is None:
            with self.timeline.measure(Activity.SLOT, name):
                slot = self.ring.take_slot()
            if part.state_format is StateFormat.SPLIT:
                if self.streams.d2h is not None and self.streams.h2d is not None:
                    # a step that is now revised may still be on its way up
                    self.streams.d2h.wait_stream(self.streams.h2d)
                with self.timeline.measure(Activity.FETCH, f"{name} (parameters)"):
                    event = self.params_to_slot(part, steps, slot)
                    if event is not None:
                        event.synchronize()
        shards = _shards(part, steps)
        for run, first in runs(part, steps):
            hyper = first.hyper
            tensors = part.step_tensors(run, grads_host[run], slot.param_host[run], first.segment, hyper.step)
            for piece in pieces(run, PIECE_NUMEL):
                here = slice(piece.start - run.start, piece.stop - run.start)
                with self.timeline.measure(Activity.ADAMW, label):
                    apply(operation, self.host, tensors.part(here), hyper, coefficient)
                with self.timeline.measure(Activity.ISSUE, name), on_stream(self.streams.h2d):
                    _copy_up(shards, slot.param_host, piece)
        if grads_host is part.accumulator:
            # before the gate opens: the next backward adds to it
            with self.timeline.measure(Activity.ADAMW, label):
                grads_host.zero_()
        slot.free_event = record(self.streams.h2d)
        part.group.gate.open(slot.free_event)
        self.ring.give_back(slot)

    def params_to_slot(self, part: Part, steps: Sequence[SegmentStep], slot: Slot) -> torch.cuda.Event | None:
        """Issues the copies of the parameters, which are half of split masters, down to where the kernel writes their
        new values. Returns the event behind them."""
        with on_stream(self.streams.d2h):
            for where, shard in _shards(part, steps):
                slot.param_host[where].copy_(shard, non_blocking=True)
        return record(self.streams.d2h)


def _shards(part: Part, steps: Sequence[SegmentStep]) -> list[tuple[slice, torch.Tensor]]:
    """Where the stepped segments lie in the part, each with as much of its shard on the device."""
    found = []
    for step in steps:
        where = part.overlap(step.segment)
        if where is not None:
            found.append((where, step.segment.shard()[part.overlap_in_segment(step.segment)]))
    return found


def _copy_up(shards: Sequence[tuple[slice, torch.Tensor]], param_host: torch.Tensor, piece: slice) -> None:
    """Issues the copies of a range of the part's new parameters."""
    for where, shard in shards:
        start, stop = max(where.start, piece.start), min(where.stop, piece.stop)
        if start < stop:
            shard[start - where.start : stop - where.start].copy_(param_host[start:stop], non_blocking=True)


def pieces(whole: slice, numel: int) -> Iterator[slice]:
    """A range in pieces of `numel`, the last one perhaps smaller."""
    for start in range(whole.start, whole.stop, numel):
        yield slice(start, min(start + numel, whole.stop))


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
