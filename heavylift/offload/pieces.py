"""One range of a host part stepped on the CPU, piece by piece through the ring (`heavylift.offload.staging`).

Down come gradients that lie on the device, and parameters that are half of split masters; up go the new parameters.
Beside a GPU the compiled kernel does all of it by one call (native/pieces.h); the loop here is its plain twin.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.cuda_driver import cuda_driver
from heavylift.offload.kernels import Kernel
from heavylift.offload.staging import Slot, StagingRing
from heavylift.offload.streams import Streams, on_stream, record
from heavylift.offload.tensors import StepTensors, Traffic
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
class RangeWork:
    """What is to be done with a range of states with the same hyperparameters."""

    tensors: StepTensors
    """`grad` on the host or the device; no `param_out`."""
    shards: tuple[tuple[slice, torch.Tensor], ...]
    """Subranges, each with the flat parameters on the device, as long."""
    operation: Operation
    hyper: AdamWHyper
    coefficient: float
    """Of a correction."""
    label: str

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.tensors.master.numel()

    @property
    def fetches_grads(self) -> bool:
        """Whether the gradients lie elsewhere than the states."""
        return self.tensors.grad.device != self.tensors.master.device

    @property
    def fetches_params(self) -> bool:
        """Whether the parameters are part of the states."""
        return self.tensors.state_format is StateFormat.SPLIT


class PieceSteps:
    """Steps ranges through a ring."""

    def __init__(self, kernel: Kernel, ring: StagingRing, streams: Streams, timeline: Timeline) -> None:
        self._kernel = kernel
        self._ring = ring
        self._streams = streams
        self._timeline = timeline

    def step(self, work: RangeWork) -> None:
        """When it returns, the states are stepped, and the copies of the parameters have been issued on the H2D stream.

        What it fetches must be there, or be behind what the fetch stream waits for. Raises RuntimeError where the
        driver fails, after which the states are not whole.
        """
        down, up, driver = self._streams.fetch, self._streams.h2d, cuda_driver()
        if down is None or up is None or driver is None or not self._kernel.copies:
            for start in range(0, work.numel, self._ring.piece_numel):
                self._step_piece(work, slice(start, min(start + self._ring.piece_numel, work.numel)), self._ring.take())
            return
        # in one call: between its pieces this thread would wait for Python's lock, which backward takes often
        traffic = Traffic(
            work.shards, work.fetches_grads, work.fetches_params, self._ring, driver, down.cuda_stream, up.cuda_stream
        )
        start_s = time.perf_counter()
        with on_stream(up):
            up.query()  # the runtime's first call makes its context current on this thread, as the driver asks
            apply(work.operation, self._kernel, replace(work.tensors, traffic=traffic), work.hyper, work.coefficient)
        stop_s = time.perf_counter()
        # the waits of a call lie all over it, and are told as one
        self._timeline.add(Activity.ADAMW, work.label, start_s, stop_s - traffic.starved_s)
        self._timeline.add(Activity.FETCH, work.label, stop_s - traffic.starved_s, stop_s)

    def _step_piece(self, work: RangeWork, where: slice, slot: Slot) -> None:
        if slot.sent is not None:
            with self._timeline.measure(Activity.SLOT, work.label):
                slot.sent.synchronize()
        tensors, params = work.tensors.part(where), slot.param_host[: where.stop - where.start]
        grads = tensors.grad
        if work.fetches_grads or work.fetches_params:
            with self._timeline.measure(Activity.FETCH, work.label):
                grads = self._fetch(work, where, slot, grads, params)
        with self._timeline.measure(Activity.ADAMW, work.label):
            piece = replace(tensors, grad=grads, param_out=params)
            apply(work.operation, self._kernel, piece, work.hyper, work.coefficient)
        with self._timeline.measure(Activity.ISSUE, work.label), on_stream(self._streams.h2d):
            for place, shard in _meeting(work, where):
                shard.copy_(params[place], non_blocking=True)
        if self._streams.h2d is not None:
            slot.sent = record(self._streams.h2d)

    def _fetch(
        self, work: RangeWork, where: slice, slot: Slot, grads: torch.Tensor, params: torch.Tensor
    ) -> torch.Tensor:
        """Brings a piece down, and waits for it. Returns its gradients on the host."""
        down, up = self._streams.fetch, self._streams.h2d
        if down is not None and up is not None:
            down.wait_stream(up)  # the step that is to be revised may still be on its way up
        with on_stream(down):
            if work.fetches_grads:
                assert slot.grad_host is not None, "this ring was made for gradients on the host"
                grads = slot.grad_host[: grads.numel()].copy_(grads, non_blocking=True)
            if work.fetches_params:
                for place, shard in _meeting(work, where):
                    params[place].copy_(shard, non_blocking=True)
        if down is not None:
            down.synchronize()
        return grads


def _meeting(work: RangeWork, where: slice) -> list[tuple[slice, torch.Tensor]]:
    """Where the shards lie in a piece, counted from its beginning, each with what of it lies there."""
    found = []
    for place, shard in work.shards:
        start, stop = max(place.start, where.start), min(place.stop, where.stop)
        if start < stop:
            inside = shard[start - place.start : stop - place.start]
            found.append((slice(start - where.start, stop - where.start), inside))
    return found
