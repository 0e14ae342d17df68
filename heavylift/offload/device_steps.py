"""The steps of the device tier's parts, gathered over all groups and done at once.

A model of 8 billion parameters has some 300 of them, and Python takes longer to launch one than the GPU to do it.
Left out: when a step is due, and the parts on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.groups import Segment, local_view
from heavylift.offload.kernels import Kernel
from heavylift.offload.states import Part
from heavylift.offload.stepping import SegmentStep, clipped
from heavylift.offload.tensors import StepTensors


class DeviceSteps:
    """Of one optimizer step: `add` parts, `run` once. Gradients and parameters stay as they are in between."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._tensors: dict[AdamWHyper, list[StepTensors]] = {}
        self._segments: list[Segment] = []
        self._prepared: dict[AdamWHyper, Callable[[AdamWHyper], None]] | None = None

    @torch.no_grad()
    def add(self, part: Part, steps: Sequence[SegmentStep], grads: torch.Tensor | None = None) -> None:
        """Adds what these segments have in the part. `grads`: the group's flat gradient; None: `param.grad`, or the
        part's accumulator where it has one."""
        rows: list[StepTensors] = []
        hyper: AdamWHyper | None = None
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
            param = local_view(segment.param).view(-1)[inside]
            tensors = part.step_tensors(where, grad, param, segment, step.hyper.step)
            if step.hyper is not hyper:  # rarely, and looking one up takes long
                hyper = step.hyper
                rows = self._tensors.setdefault(hyper, [])
            rows.append(tensors)

    def prepare(self) -> None:
        """Does, after the last `add`, all that needs no clipping coefficient: while the norm is still on its way."""
        self._prepared = {hyper: self._kernel.prepare_all(tensors) for hyper, tensors in self._tensors.items()}

    def run(self, coefficient: float = 1.0) -> None:
        """On the current stream, in place: one call of the kernel for each set of hyperparameters. `coefficient` scales
        the gradients, as in `scaled`."""
        if self._prepared is None:
            self.prepare()
        assert self._prepared is not None
        for hyper, step in self._prepared.items():
            step(clipped(hyper, coefficient))
        for segment in self._segments:
            segment.mark_seen()  # a group without a host part has no gate that would
