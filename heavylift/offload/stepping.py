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
from heavylift.offload.native import copy_to_device
from heavylift.offload.staging import Slot, StagingRing
from heavylift.offload.states import Part
from heavylift.offload.tensors import Send, StepTensors
from heavylift.offload.timeline import Activity, Timeline

PIECE_NUMEL = 2**23
"""Elements whose new parameters go up while the next are computed: copies of a third of a millisecond, ten times as
long apart. A copy engine serves one stream until nothing more of it is ready, and FSDP2's small tables for gathering
and scattering go up in the compute stream, which stands still for as long as a whole group's copies take in one go."""


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

    `d2h`: gradients, as they come. `fetch`: down, too, what the worker asks for when it is about to step a part: on
    `d2h` that would come behind gradients that backward, which is issued far ahead, has not computed yet.

    Made once: new streams per step would grow the allocator's pools.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.d2h = torch.cuda.Stream(device) if is_cuda else None
        self.fetch = torch.cuda.Stream(device) if is_cuda else None
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
        for stream in (self.d2h, self.fetch, self.h2d):
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
        """On the CPU; the new parameters go up on the H2D stream, and the group's gate opens behind the last of them.

        grads_host: flat [part.numel], float32 or the parameters' dtype, already there. `slot`: of the ring, with the
        parameters in it where the states are `split`; None: it is taken here. May run on any thread.
        """
        assert self.ring is not None
        name = part.group.name
        if slot is None:
            with self.timeline.measure(Activity.SLOT, name):
                slot = self.ring.take_slot()
                slot.wait_until_free()
            if part.state_format is StateFormat.SPLIT:
                with self.timeline.measure(Activity.FETCH, f"{name} (parameters)"):
                    event = self.params_to_slot(part, steps, slot)
                    if event is not None:
                        event.synchronize()
        for run, first in runs(part, steps):
            hyper = first.hyper
            tensors = part.step_tensors(run, grads_host[run], slot.param_host[run], first.segment, hyper.step)
            self._step_and_send(tensors, _shards(part, steps, run), operation, hyper, coefficient, name)
        if grads_host is part.accumulator:
            # before the gate opens: the next backward adds to it
            with self.timeline.measure(Activity.ADAMW, name):
                grads_host.zero_()
        slot.free_event = record(self.streams.h2d)
        part.group.gate.open(slot.free_event)
        self.ring.give_back(slot)

    def _step_and_send(
        self,
        tensors: StepTensors,
        shards: tuple[tuple[slice, torch.Tensor], ...],
        operation: Operation,
        hyper: AdamWHyper,
        coefficient: float,
        name: str,
    ) -> None:
        """The kernel's work on one range, and `param_out` on its way up to `shards`."""
        label = name if operation is Operation.STEP else f"{name} ({operation})"
        stream, copy_function = self.streams.h2d, copy_to_device()
        if stream is not None and copy_function is not None and self.host.sends:
            # in one call: between its pieces this thread would wait for Python's lock, which backward takes often
            send = Send(shards, stream.cuda_stream, copy_function, PIECE_NUMEL)
            with self.timeline.measure(Activity.ADAMW, label), on_stream(stream):
                stream.query()  # the runtime's first call makes its context current on this thread, as the driver asks
                apply(operation, self.host, replace(tensors, send=send), hyper, coefficient)
            return
        with self.timeline.measure(Activity.ADAMW, label):
            apply(operation, self.host, tensors, hyper, coefficient)
        assert tensors.param_out is not None
        with self.timeline.measure(Activity.ISSUE, name), on_stream(stream):
            for where, shard in shards:
                shard.copy_(tensors.param_out[where], non_blocking=True)

    def params_to_slot(self, part: Part, steps: Sequence[SegmentStep], slot: Slot) -> torch.cuda.Event | None:
        """Issues the copies of the parameters, which are half of split masters, down to where the kernel writes their
        new values. They begin behind what has been issued up to now: a step that is to be revised may still be on its
        way up. Returns the event behind them."""
        streams = self.streams
        if streams.fetch is not None and streams.h2d is not None:
            streams.fetch.wait_stream(streams.h2d)
        with on_stream(streams.fetch):
            for where, shard in _shards(part, steps):
                slot.param_host[where].copy_(shard, non_blocking=True)
        return record(streams.fetch)


def _shards(
    part: Part, steps: Sequence[SegmentStep], run: slice | None = None
) -> tuple[tuple[slice, torch.Tensor], ...]:
    """Where the stepped segments lie in a range of the part (None: all of it), counted from its beginning, each with as
    much of its shard on the device."""
    first, last = (0, part.numel) if run is None else (run.start, run.stop)
    found = []
    for step in steps:
        where = part.overlap(step.segment)
        # a range holds a segment whole or not at all
        if where is not None and first <= where.start and where.stop <= last:
            shard = step.segment.shard()[part.overlap_in_segment(step.segment)]
            found.append((slice(where.start - first, where.stop - first), shard))
    return tuple(found)


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
