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

from heavylift.offload.formats import for_each_chunk
from heavylift.offload.tensors import StepTensors

# elements worked on at a time: bounds the temporaries (20 bytes an element) yet keeps thread barriers and launches few
_CHUNK_CPU = 2**22
_CHUNK_DEVICE = 2**26


@dataclass(frozen=True)
class AdamWHyper:
    """What one step needs beside the tensors. `step` counts from 1; `grad_scale` multiplies the gradient first.

    Without `bias_correction` the moments are used as they are, too small in the first steps, as BERT was trained.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    bias_correction: bool = True

    def __post_init__(self) -> None:
        assert self.step >= 1, f"step counts from 1, got {self.step}"
        assert 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, f"betas are in [0, 1), got {self.beta1}, {self.beta2}"
        assert self.lr >= 0 and self.eps >= 0 and self.weight_decay >= 0, f"negative hyperparameter: {self}"

    def scalars(self) -> AdamWScalars:
        """The factors of this step: computed in double precision, each rounded once to float32."""
        bias1 = 1 - self.beta1**self.step if self.bias_correction else 1.0
        bias2 = 1 - self.beta2**self.step if self.bias_correction else 1.0
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


@torch.no_grad()
def adamw_step_(tensors: StepTensors, hyper: AdamWHyper) -> None:
    """Do one AdamW step in place (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, in torch.optim's order).

    With lr 0 the master keeps its bits (also -0.0, also under a non-finite gradient) and only the moments move.
    Raises AssertionError for tensors that do not fit.
    """
    scalars = hyper.scalars()
    for_each_chunk(tensors, _CHUNK_CPU, _CHUNK_DEVICE, lambda part: _step_chunk_(part, scalars))


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
