"""Who computes: one interface for the compiled CPU kernel, its plain PyTorch twin, and the GPU.

All of them compute the same bits (`heavylift.offload.adamw` is the specification); they differ in speed only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from heavylift.offload import native
from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.correction import adamw_correct_, adamw_undo_
from heavylift.offload.tensors import StepTensors
from heavylift.offload.timeline import ThreadSpan


class Kernel(Protocol):
    """What the optimizer asks of a tier's arithmetic. All tensors lie on that tier."""

    @property
    def copies(self) -> bool:
        """Whether it does what `StepTensors.traffic` says."""

    def step(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """One AdamW step in place. See `adamw_step_`."""

    def prepare_all(self, tensors: Sequence[StepTensors]) -> Callable[[AdamWHyper], None]:
        """`step` of each, with the same bits, in as few calls as may be: none of them overlap. Does what can be done
        before the hyperparameters are known and returns the rest, to be called once, while the current stream is the
        same."""

    def correct(self, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
        """Makes of the step just done the one with `coefficient` (0 to 1) times the gradient. See `adamw_correct_`."""

    def undo(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """Takes the step just done back. See `adamw_undo_`."""

    def accumulate(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """total (float32) += grad (float32, bfloat16 or float16)."""

    def sum_squares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of squares as a float64 scalar on the tensor's device; not finite if an element is not."""

    def take_spans(self) -> list[ThreadSpan]:
        """When threads of its own had work since the last call; none where the caller's thread does it."""

    def close(self) -> None:
        """Ends threads."""


class PlainKernel:
    """The specification itself, on any device."""

    copies = False

    def step(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """See `adamw_step_`."""
        adamw_step_(tensors, hyper)

    def prepare_all(self, tensors: Sequence[StepTensors]) -> Callable[[AdamWHyper], None]:
        """One after the other; nothing can be done before."""
        return partial(_step_each, self, tensors)

    def correct(self, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
        """See `adamw_correct_`."""
        adamw_correct_(tensors, hyper, coefficient)

    def undo(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """See `adamw_undo_`."""
        adamw_undo_(tensors, hyper)

    def accumulate(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """total += grad."""
        total.add_(grad.float())

    def sum_squares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Accumulated in float64: the order of a sum then does not show in the float32 clipping coefficient."""
        return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()

    def take_spans(self) -> list[ThreadSpan]:
        """The caller's thread does it."""
        return []

    def close(self) -> None:
        """Nothing to end."""


class NativeKernel:
    """The compiled kernel on its own pinned threads; calls release the GIL."""

    def __init__(self, library: native.NativeKernel, num_threads: int, cpu_ids: Sequence[int] | None) -> None:
        self._library = library
        self._pool = library.pool(num_threads, cpu_ids)
        self.copies = True

    def step(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """See `adamw_step_`."""
        self._library.adamw_step_(self._pool, tensors, hyper)

    def prepare_all(self, tensors: Sequence[StepTensors]) -> Callable[[AdamWHyper], None]:
        """One after the other; nothing can be done before."""
        return partial(_step_each, self, tensors)

    def correct(self, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
        """See `adamw_correct_`."""
        self._library.adamw_correct_(self._pool, tensors, hyper, coefficient)

    def undo(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """See `adamw_undo_`."""
        self._library.adamw_undo_(self._pool, tensors, hyper)

    def accumulate(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """total += grad."""
        self._library.accumulate_(self._pool, total, grad)

    def sum_squares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fixed chunks, added in order: the same bits for any number of threads."""
        return torch.tensor(self._library.sum_squares(self._pool, tensor), dtype=torch.float64)

    def take_spans(self) -> list[ThreadSpan]:
        """See `ThreadPool.take_spans`."""
        return self._pool.take_spans()

    def close(self) -> None:
        """Joins the threads."""
        self._pool.close()


def _step_each(kernel: Kernel, tensors: Sequence[StepTensors], hyper: AdamWHyper) -> None:
    for one in tensors:
        kernel.step(one, hyper)


def host_kernel(use_native: bool, num_threads: int, cpu_ids: Sequence[int] | None = None) -> Kernel:
    """The kernel of the host tier; the plain twin when the compiled one is not there or not wanted."""
    library = native.load() if use_native else None
    return PlainKernel() if library is None else NativeKernel(library, num_threads, cpu_ids)


def device_kernel(device: torch.device) -> Kernel:
    """The kernel of the device tier: fused on CUDA, plain elsewhere."""
    if device.type == "cuda":
        from heavylift.offload.fused_gpu import FusedGpuKernel

        return FusedGpuKernel()
    return PlainKernel()
