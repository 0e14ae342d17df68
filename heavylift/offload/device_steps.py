"""The steps of the device tier's parts, gathered over all groups and done at once.

A model of 8 billion parameters has some 300 of them, and Python takes longer to launch one than the GPU to do it.
Left out: when a step is due, and the parts on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.groups import Segment
from heavylift.offload.kernels import Kernel
from heavylift.offload.states import Part
from heavylift.offload.stepping import SegmentStep
from heavylift.offload.tensors import StepTensors


class DeviceSteps:
    """Of one optimizer step. Gradients and parameters must stay as they are from `add` until `run`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._tensors: dict[AdamWHyper, list[StepTensors]] = {}
        self._segments: list[Segment] = []

    def add(self, part: Part, steps: Sequence[SegmentStep], grads: torch.Tensor | None = None) -> None:
        """Adds what these segments have in the part. `grads`: the group's flat gradient; None: `param.grad`, or the
        part's accumulator where it has one."""
        for step in steps:
            segment = step.segment
            self._segments.append(segment)
            where = part.overlap(segment)
            if where is None:
                continue
            offset = part.start - segment.start
            inside = slice(where.start + offset, where.stop + offset)
            if part.accumulator is not None:
                grad = part.accumulator[where]
            elif grads is not None:
                grad = grads[part.start + where.start : part.start + where.stop]
            else:
                whole = segment.grad()
                assert whole is not None, f"{segment.name} has no gradient"
                grad = whole[inside]
            tensors = part.step_tensors(where, grad, segment.shard()[inside], segment, step.hyper.step)
            self._tensors.setdefault(step.hyper, []).append(tensors)

    def run(self) -> None:
        """On the current stream, in place: one call of the kernel for each set of hyperparameters."""
        for hyper, tensors in self._tensors.items():
            self._kernel.step_all(tensors, hyper)
        self._tensors.clear()
        for segment in self._segments:
            segment.mark_seen()  # a group without a host part has no gate that would
        self._segments.clear()
