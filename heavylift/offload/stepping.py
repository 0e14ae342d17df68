"""Stepping one part of a group where it lies, and bringing the updated shard home.

Shared by the synchronous step and by the overlapped schedules: they differ in who calls this, and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.groups import Segment
from heavylift.offload.kernels import Kernel
from heavylift.offload.pieces import Operation, PieceSteps, RangeWork
from heavylift.offload.staging import StagingRing
from heavylift.offload.states import Part
from heavylift.offload.streams import Streams, record
from heavylift.offload.timeline import Activity, Timeline


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
        self.pieces = None if ring is None else PieceSteps(host, ring, streams, timeline)

    def step_host_part(
        self,
        part: Part,
        steps: Sequence[SegmentStep],
        grads: torch.Tensor,
        operation: Operation = Operation.STEP,
        coefficient: float = 1.0,
    ) -> None:
        """On the CPU, piece by piece; the new parameters go up on the H2D stream, and the group's gate opens behind the
        last of them.

        grads: flat [part.numel], float32 or the parameters' dtype, on the host or the device, where they have arrived.
        May run on any thread, but on one at a time.
        """
        assert self.pieces is not None
        name = part.group.name
        label = name if operation is Operation.STEP else f"{name} ({operation})"
        for run, first in runs(part, steps):
            tensors = part.step_tensors(run, grads[run], None, first.segment, first.hyper.step)
            work = RangeWork(tensors, _shards(part, steps, run), operation, first.hyper, coefficient, label)
            self.pieces.step(work)
        if grads is part.accumulator:
            # before the gate opens: the next backward adds to it
            with self.timeline.measure(Activity.ADAMW, name):
                grads.zero_()
        part.group.gate.open(record(self.streams.h2d))


def _shards(part: Part, steps: Sequence[SegmentStep], run: slice) -> tuple[tuple[slice, torch.Tensor], ...]:
    """Where the stepped segments lie in a range of the part, counted from its beginning, each with as much of its shard
    on the device."""
    found = []
    for step in steps:
        where = part.overlap(step.segment)
        # a range holds a segment whole or not at all
        if where is not None and run.start <= where.start and where.stop <= run.stop:
            shard = step.segment.shard()[part.overlap_in_segment(step.segment)]
            found.append((slice(where.start - run.start, where.stop - run.start), shard))
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
