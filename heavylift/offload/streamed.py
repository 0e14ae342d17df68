"""The step of host parts on the GPU: states go up over the bus, are stepped there and go home, chunk by chunk.

    up stream      states of chunk k+1 into a slot on the device
    step stream    the fused kernel on chunk k: slot and gradient, which never left the device; writes the parameters
    down stream    states of chunk k-1 home

All three at once: the bus carries both directions. The CPU computes nothing, and a bfloat16 gradient and the updated
parameters do not cross the bus at all. What crosses is twice the states: 24 bytes a parameter, 20 with `split`. The
slots are a ring: whoever issues the copies waits for the copy home out of the slot that it is about to fill again, so
that only so much is issued ahead and what waits can still be put into another order.

One chunk at a time is on its way up, and the next is issued when it has arrived. A copy engine serves one stream until
nothing more of it is ready; FSDP2's small tables for gathering and scattering, which go up in the compute stream, get
their turn in the gap. With the next chunk already in the queue, each of them waited for 5 to 17 ms, and forward or
backward with it.

The bits are those of the CPU step: both kernels equal one specification. Left out: who issues this and when
(`heavylift.offload.overlap`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from heavylift.offload.kernels import Kernel
from heavylift.offload.pieces import Operation, apply
from heavylift.offload.states import Part
from heavylift.offload.stepping import SegmentStep
from heavylift.offload.streams import on_stream, record
from heavylift.offload.tiers import TierUsage
from heavylift.offload.timeline import Activity, Timeline

CHUNK_NUMEL = 2**21
"""Elements that travel together: copies of 4 to 8 MB, half a millisecond for the three. Larger ones make others wait
for longer, smaller ones take the issuing thread longer than the bus."""
NUM_SLOTS = 3
"""One on its way up, one being stepped, one on its way home."""
_FIRST = -1
"""Priority of the step stream: its kernels are short, and others wait for them."""


@dataclass(eq=False)
class _Slot:
    """Room on the device for the states of one chunk."""

    states: tuple[torch.Tensor, ...]
    home_event: torch.cuda.Event | None = None
    """Behind the copy home that last read the slot."""

    def wait_until_free(self) -> None:
        """Blocks until nothing of what was here before is still to be copied home."""
        if self.home_event is not None:
            self.home_event.synchronize()
            self.home_event = None


@dataclass(frozen=True)
class _Piece:
    """What of one segment lies in a chunk."""

    step: SegmentStep
    in_part: slice
    in_segment: slice


def slot_bytes(host_numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
    """Device bytes of the slots for streamed parts of these sizes, whose states have these dtypes."""
    return NUM_SLOTS * _chunk_numel(host_numels) * sum(dtype.itemsize for dtype in dtypes)


def _chunk_numel(host_numels: Sequence[int]) -> int:
    return min(CHUNK_NUMEL, max(host_numels, default=0))


class StreamedSteps:
    """Steps parts whose states lie on the host with the device's kernel."""

    def __init__(
        self, kernel: Kernel, device: torch.device, parts: Sequence[Part], usage: TierUsage, timeline: Timeline
    ) -> None:
        """`parts`: all that will be stepped here; their host memory is page-locked where the device is a GPU."""
        assert parts and all(part.streamed for part in parts), f"{len(parts)} parts to be streamed"
        self._kernel = kernel
        self._timeline = timeline
        self._chunk_numel = _chunk_numel([part.numel for part in parts])
        dtypes = [tensor.dtype for tensor in parts[0].stored()]
        self._slots = [
            _Slot(tuple(torch.empty(self._chunk_numel, dtype=dtype, device=device) for dtype in dtypes))
            for _ in range(NUM_SLOTS)
        ]
        usage.device_bytes += slot_bytes([part.numel for part in parts], dtypes)
        self._next = 0
        self._up_event: torch.cuda.Event | None = None
        """Behind the last chunk's way up."""
        is_cuda = device.type == "cuda"
        self._device = device
        # streams of their own: behind a chunk that waits for its step, no gradient or parameter should have to wait
        self._up = torch.cuda.Stream(device) if is_cuda else None
        self._step = torch.cuda.Stream(device, priority=_FIRST) if is_cuda else None
        self._down = torch.cuda.Stream(device) if is_cuda else None

    def after_current(self) -> None:
        """Steps begin after what has been issued on the current stream: gradients, readers of the parameters."""
        if self._step is not None:
            self._step.wait_stream(torch.cuda.current_stream(self._device))

    def run(
        self,
        part: Part,
        steps: Sequence[SegmentStep],
        grads: torch.Tensor | None,
        operation: Operation = Operation.STEP,
        coefficient: float = 1.0,
    ) -> None:
        """Issues the whole part, and opens its group's gate behind the last chunk's kernel.

        grads: flat [part.numel] on the device, already there or behind `after_current`; None: the part's accumulator,
        which goes up with the states and comes home as zeros. May run on any thread.
        """
        label = part.group.name if operation is Operation.STEP else f"{part.group.name} ({operation})"
        if grads is not None and self._step is not None:
            # it belongs to the stream that reduced it and must not be given out again while it is read here
            grads.record_stream(self._step)
        if self._up is not None and part.home_event is not None:
            self._up.wait_event(part.home_event)
        stepped_event = None
        with self._timeline.measure(Activity.STREAM, label):
            for start in range(0, part.numel, self._chunk_numel):
                chunk = slice(start, min(start + self._chunk_numel, part.numel))
                pieces = list(_pieces(part, steps, chunk))
                if pieces:
                    stepped_event = self._run_chunk(part, chunk, pieces, grads, operation, coefficient)
        part.group.gate.open(stepped_event)

    def _run_chunk(
        self,
        part: Part,
        chunk: slice,
        pieces: Sequence[_Piece],
        grads: torch.Tensor | None,
        operation: Operation,
        coefficient: float,
    ) -> torch.cuda.Event | None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        numel = chunk.stop - chunk.start
        at_home = [tensor[chunk] for tensor in part.stored()]
        here = [tensor[:numel] for tensor in slot.states]
        slot.wait_until_free()
        if self._up_event is not None:
            self._up_event.synchronize()
        with on_stream(self._up):
            for source, target in zip(at_home, here, strict=True):
                target.copy_(source, non_blocking=True)
        self._up_event = record(self._up)
        with on_stream(self._step):
            if self._step is not None and self._up_event is not None:
                self._step.wait_event(self._up_event)
            for piece in pieces:
                self._compute(part, piece, chunk.start, here, grads, operation, coefficient)
            if grads is None:
                here[-1].zero_()
        stepped_event = record(self._step)
        with on_stream(self._down):
            if self._down is not None and stepped_event is not None:
                self._down.wait_event(stepped_event)
            for source, target in zip(here, at_home, strict=True):
                target.copy_(source, non_blocking=True)
        slot.home_event = part.home_event = record(self._down)
        return stepped_event

    def _compute(
        self,
        part: Part,
        piece: _Piece,
        start: int,
        here: Sequence[torch.Tensor],
        grads: torch.Tensor | None,
        operation: Operation,
        coefficient: float,
    ) -> None:
        hyper, at = piece.step.hyper, piece.in_part
        in_slot = slice(at.start - start, at.stop - start)
        grad = here[-1][in_slot] if grads is None else grads[at]
        param = piece.step.segment.shard()[piece.in_segment]
        master, exp_avg, exp_avg_sq = (tensor[in_slot] for tensor in here[:3])
        described = part.step_tensors(at, grad, param, piece.step.segment, hyper.step)
        tensors = replace(described, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        apply(operation, self._kernel, tensors, hyper, coefficient)

    def synchronize(self) -> None:
        """Blocks until everything issued is home."""
        for slot in self._slots:
            slot.wait_until_free()


def _pieces(part: Part, steps: Sequence[SegmentStep], chunk: slice) -> Iterator[_Piece]:
    """What the stepped segments have in a chunk of the part."""
    for step in steps:
        where = part.overlap(step.segment)
        if where is None:
            continue
        start, stop = max(where.start, chunk.start), min(where.stop, chunk.stop)
        if start < stop:
            offset = part.start - step.segment.start
            yield _Piece(step, slice(start, stop), slice(start + offset, stop + offset))
