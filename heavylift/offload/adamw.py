"""One AdamW step on flat tensors, in plain PyTorch: the specification of every faster kernel.

The arithmetic is a fixed sequence of single IEEE float32 operations (multiply, add, subtract, divide, square root),
in the order of `torch.optim.AdamW`. No `addcmul`, `lerp`, `addcdiv` or `alpha=`: builds of PyTorch differ in whether
those contract to a fused multiply-add, and then no other kernel could be bit-identical. The same code runs on any
device; on the CPU it is also what trains when the compiled kernel of `heavylift.offload.native` is missing.

Left out: AMSGrad, maximize, coupled (L2) weight decay, and where the tensors live.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# elements worked on at a time: bounds the temporaries (20 bytes an element) yet keeps thread barriers and launches few
_CHUNK_CPU = 2**22
_CHUNK_DEVICE = 2**26

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes of gradients and parameters beside float32."""


@dataclass(frozen=True)
class AdamWHyper:
    """What one step needs beside the tensors. `step` counts from 1; `grad_scale` multiplies the gradient first."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.step >= 1, f"step counts from 1, got {self.step}"
        assert 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"betas are in [0, 1), got {self.beta1}, {self.beta2}"
        assert self.lr >= 0 and self.eps >= 0 and self.weight_decay >= 0, f"negative hyperparameter: {self}"

    def scalars(self) -> AdamWScalars:
        """The factors of this step: computed in double precision, each rounded once to float32."""
        bias1 = 1 - self.beta1**self.step
        bias2 = 1 - self.beta2**self.step
        return AdamWScalars(
            grad_scale=_float32(self.grad_scale),
            decay=_float32(1 - self.lr * self.weight_decay),
            one_minus_beta1=_float32(1 - self.beta1),
            beta2=_float32(self.beta2),
            one_minus_beta2=_float32(1 - self.beta2),
            bias2_sqrt=_float32(math.sqrt(bias2)),
            eps=_float32(self.eps),
            neg_step_size=_float32(-self.lr / bias1),
            update=self.lr != 0,
        )


@dataclass(frozen=True)
class AdamWScalars:
    """Factors of one step. Every float is exactly representable in float32; `update` is false when lr is 0."""

    grad_scale: float
    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
    eps: float
    neg_step_size: float
    update: bool


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


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

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        states = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "grad": self.grad}
        return states if self.param_out is None else {**states, "param_out": self.param_out}

    def part(self, where: slice) -> StepTensors:
        """Views of a range of elements."""
        out = None if self.param_out is None else self.param_out[where]
        return StepTensors(self.master[where], self.exp_avg[where], self.exp_avg_sq[where], self.grad[where], out)

    def check(self) -> None:
        """Assert shapes, dtypes and the common device."""
        master = self.master
        for name, tensor in self.named().items():
            low_precision = LOW_PRECISION if name in ("grad", "param_out") else ()
            assert tensor.dtype in (torch.float32, *low_precision), f"{name} has dtype {tensor.dtype}"
            assert tensor.ndim == 1 and tensor.numel() == master.numel(), (
                f"{name} has shape {tuple(tensor.shape)}, master {tuple(master.shape)}"
            )
            assert tensor.device == master.device, f"{name} is on {tensor.device}, master on {master.device}"


@torch.no_grad()
def adamw_step_(tensors: StepTensors, hyper: AdamWHyper) -> None:
    """Do one AdamW step in place (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, in torch.optim's order).

    With lr 0 the master keeps its bits (also -0.0, also under a non-finite gradient) and only the moments move.
    Raises AssertionError for tensors that do not fit.
    """
    tensors.check()
    scalars = hyper.scalars()
    for part in chunks(tensors.master, _CHUNK_CPU, _CHUNK_DEVICE):
        _step_chunk_(tensors.part(part), scalars)


def chunks(tensor: Tensor, chunk_cpu: int, chunk_device: int) -> list[slice]:
    """Ranges of at most so many elements that make up a flat tensor, by the device it is on."""
    chunk = chunk_cpu if tensor.device.type == "cpu" else chunk_device
    return [slice(start, start + chunk) for start in range(0, tensor.numel(), chunk)]


def _step_chunk_(tensors: StepTensors, s: AdamWScalars) -> None:
    p, m, v = tensors.master, tensors.exp_avg, tensors.exp_avg_sq
    g = tensors.grad.float()
    if s.grad_scale != 1.0:
        g = g * s.grad_scale
    m.add_((g - m).mul_(s.one_minus_beta1))
    v.mul_(s.beta2).add_((g * s.one_minus_beta2).mul_(g))
    if s.update:
        if s.decay != 1.0:
            p.mul_(s.decay)
        # a tensor divisor: PyTorch's CUDA kernel turns division by a Python number into a product with its reciprocal
        bias2_sqrt = torch.full((), s.bias2_sqrt, dtype=torch.float32, device=p.device)
        denom = _sqrt(v).div_(bias2_sqrt).add_(s.eps)
        p.add_((m * s.neg_step_size).div_(denom))
    if tensors.param_out is not None:
        tensors.param_out.copy_(p)


def _sqrt(x: Tensor) -> Tensor:
    """The correctly rounded float32 root.

    `torch.sqrt` on the CPU is not (its vector library is 1 ulp off for 17% of all float32 values). Through double it
    is: the root of a 24-bit number is never closer to the middle of two float32 than a double tells apart
    (Figueroa, "When is double rounding innocuous?", 1995; tried on all 2^31 non-negative float32).
    """
    return x.double().sqrt_().float()
