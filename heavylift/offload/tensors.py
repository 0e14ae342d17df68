"""The tensors of one step, as they travel from the optimizer to the kernels, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heavylift.config.schema import StateFormat
from heavylift.offload.cuda_driver import Driver
from heavylift.offload.noise import Noise
from heavylift.offload.quantised import BLOCK, num_blocks
from heavylift.offload.staging import StagingRing

MOMENTS = ("exp_avg", "exp_avg_sq")
LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes of gradients and parameters beside float32."""
_FLOATS = (torch.float32, *LOW_PRECISION)


@dataclass(eq=False)
class Traffic:
    """What the compiled kernel brings down and sends up by itself while it steps a range, piece by piece.

    Then `StepTensors.grad` is where the gradients lie, be it the device, and `param_out` is None: new parameters are
    written to the places of the ring.
    """

    shards: tuple[tuple[slice, Tensor], ...]
    """Ranges, each with the flat tensor on the device, as long, that its new parameters go to."""
    fetches_grads: bool
    """The gradients lie on the device."""
    fetches_params: bool
    """The parameters before the step come down first: they are half of split masters."""
    ring: StagingRing
    driver: Driver
    down_handle: int
    """Of the CUDA stream that copies down; `up_handle` copies up."""
    up_handle: int
    starved_s: float = 0.0
    """Set by the kernel: seconds in which there was nothing to step, because it had not come yet."""


@dataclass(frozen=True)
class StepTensors:
    """What a step reads and writes: flat tensors of one length, on one device, none overlapping."""

    master: Tensor
    """float32 [n], updated; so are the moments."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    """float32, bfloat16 or float16 [n], read."""
    param_out: Tensor | None
    """float32, bfloat16 or float16 [n], receives the new master rounded to nearest even; None: nobody wants it."""
    state_format: StateFormat = StateFormat.FP32
    """How the states are stored, see `heavylift.offload.formats`. `split`: `master` is int16, and `param_out` bfloat16,
    which holds the parameters before the step, too. `bf16`: the moments are bfloat16. `int8`: they are uint8 codes."""
    noise: Noise | None = None
    """What rounds moments of `bf16` and `int8`; None with formats that need no rounding."""
    scales: tuple[Tensor, Tensor] | None = None
    """Of the blocks of exp_avg and exp_avg_sq, float32 [num_blocks(n)]; None with formats other than `int8`."""
    traffic: Traffic | None = None
    """Understood by the compiled kernel alone (`heavylift.offload.kernels.Kernel.copies`)."""

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, but for `scales`."""
        states = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "grad": self.grad}
        return states if self.param_out is None else {**states, "param_out": self.param_out}

    def part(self, where: slice) -> StepTensors:
        """Views of a range of elements. With `int8` it begins with a block."""
        out = None if self.param_out is None else self.param_out[where]
        states = self.master[where], self.exp_avg[where], self.exp_avg_sq[where]
        noise = None if self.noise is None else self.noise.advanced(where.start)
        scales = None
        if self.scales is not None:
            assert where.start % BLOCK == 0, f"a part begins at {where.start}, inside of a block"
            blocks = slice(where.start // BLOCK, num_blocks(where.stop))
            scales = self.scales[0][blocks], self.scales[1][blocks]
        return StepTensors(*states, self.grad[where], out, self.state_format, noise, scales)

    def check(self) -> None:
        """Assert shapes, dtypes and the common device."""
        if self.state_format is StateFormat.FP32 or self.state_format is StateFormat.SPLIT:
            if self._fits_exactly():
                return
        self._check_each()

    def _fits_exactly(self) -> bool:
        """What `_check_each` asserts of the formats without rounding, in a fifth of its time: a step has hundreds of
        segments, which a GPU is through with in less time than Python."""
        master, exp_avg, exp_avg_sq, grad, out = self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.param_out
        if self.state_format is StateFormat.SPLIT:
            dtypes = master.dtype is torch.int16 and out is not None and out.dtype is torch.bfloat16
        else:
            dtypes = master.dtype is torch.float32 and (out is None or out.dtype in _FLOATS)
        dtypes = dtypes and exp_avg.dtype is exp_avg_sq.dtype is torch.float32 and grad.dtype in _FLOATS
        shape, device = master.shape, master.device
        rest = (exp_avg, exp_avg_sq, grad) if out is None else (exp_avg, exp_avg_sq, grad, out)
        alike = len(shape) == 1 and all([t.shape == shape and t.device == device for t in rest])
        return dtypes and alike and self.noise is None and self.scales is None

    def _check_each(self) -> None:
        master = self.master
        for name, tensor in self.named().items():
            assert tensor.dtype in self._dtypes_of(name), f"{name} has dtype {tensor.dtype}"
            assert tensor.ndim == 1 and tensor.numel() == master.numel(), (
                f"{name} has shape {tuple(tensor.shape)}, master {tuple(master.shape)}"
            )
            assert tensor.device == master.device, f"{name} is on {tensor.device}, master on {master.device}"
        split, coded = (self.state_format is other for other in (StateFormat.SPLIT, StateFormat.INT8))
        assert not split or self.param_out is not None, "split masters need the parameters"
        assert self.state_format.is_exact == (self.noise is None), f"{self.state_format} and {self.noise}"
        assert coded == (self.scales is not None), f"{self.state_format}, scales {self.scales is not None}"
        for scales in self.scales or ():
            assert scales.dtype == torch.float32 and scales.shape == (num_blocks(master.numel()),), (
                f"scales of {scales.dtype} and shape {tuple(scales.shape)} for {master.numel()} elements"
            )
            assert scales.device == master.device, f"scales are on {scales.device}, master on {master.device}"

    def _dtypes_of(self, name: str) -> tuple[torch.dtype, ...]:
        split = self.state_format is StateFormat.SPLIT
        if name == "master" and split:
            return (torch.int16,)
        if name == "param_out" and split:
            return (torch.bfloat16,)
        if name in ("exp_avg", "exp_avg_sq") and self.state_format is StateFormat.BF16:
            return (torch.bfloat16,)
        if name in ("exp_avg", "exp_avg_sq") and self.state_format is StateFormat.INT8:
            return (torch.uint8,)
        return _FLOATS if name in ("grad", "param_out") else (torch.float32,)
