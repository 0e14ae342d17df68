"""Takes an AdamW step back, wholly or in part, from the state after it and its gradient, without a snapshot.

A step may be done before the gradient norm of the whole model is known. If the norm then asks for clipping by a
coefficient c < 1, `adamw_correct_` makes of it the step with c times the gradient; if the step should not have been
(another rank's gradient is not finite), `adamw_undo_` restores the state before it.

How: the step is `m = m0 + (1-b1)(g - m0)`, `w = b2 v0`, `v = w + (1-b2) g g`, `q = decay p0`, `p = q + u(m, v)`. From
m, v, p and g follow m0, w, q; then the end of the step is done again with the clipped gradient. Everything is float32
in the step's own order, on purpose: what was added is then known to the bit, and `v - added` and `p - u`, rounded,
return the very w and q unless the sum crossed a power of two or the summand was the larger part. Adding a correction to
p in float64 is worse: it rounds the wrong step's p, not q (p bit-equal in 75% of a test's elements instead of 99.4%).
m0 solves `m = m0 + (1-b1)(g - m0)`: by algebra, then once more with what the step makes of that solution.

How exact: see `adamw_correct_` and `adamw_undo_`. This file is the specification; the compiled kernel has its bits.

Left out: gradients that are not finite, or whose square overflows float32 (beyond about 5e20 at beta2 0.999): such a
step destroys the state and must not be done before the norm is known. Repeated steps: only the last can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heavylift.offload.adamw import AdamWHyper, AdamWScalars, _sqrt
from heavylift.offload.formats import for_each_chunk
from heavylift.offload.tensors import StepTensors

# elements worked on at a time: bounds the temporaries, about 40 bytes an element
_CHUNK_CPU = 2**21
_CHUNK_DEVICE = 2**25


@dataclass(frozen=True)
class CorrectionScalars:
    """Factors beside those of the step; floats are exactly representable in float32.

    `first_step`: the moments were zeros before. `inverse_beta1` is 0 for beta1 0: no trace of the old moment is left.
    """

    step: AdamWScalars
    first_step: bool
    inverse_beta1: float


def correction_scalars(hyper: AdamWHyper) -> CorrectionScalars:
    """The factors that take back the step done with `hyper`."""
    step = hyper.scalars()
    beta1 = 1 - step.one_minus_beta1
    inverse = 0.0 if beta1 == 0 else torch.tensor(1 / beta1, dtype=torch.float64).float().item()
    return CorrectionScalars(step, hyper.step == 1, inverse)


def clipped_scale(hyper: AdamWHyper, coefficient: float) -> float:
    """The float32 factor of the gradient in the clipped step. Raises AssertionError unless 0 < coefficient < 1."""
    assert 0 < coefficient < 1, f"a clipping coefficient is between 0 and 1, got {coefficient}"
    return replace(hyper, grad_scale=hyper.grad_scale * coefficient).scalars().grad_scale


def check_exact(tensors: StepTensors) -> None:
    """Assert that the states after the step are those that it computed."""
    assert tensors.state_format.is_exact, f"with {tensors.state_format} states a step cannot be taken back"


def check_undo(hyper: AdamWHyper) -> None:
    """Assert that nothing of the state before the step is lost altogether: see `adamw_undo_`."""
    assert hyper.step == 1 or (hyper.beta1 > 0 and hyper.beta2 > 0), (
        f"a step with a beta of 0 leaves no trace of that moment and cannot be undone: {hyper}"
    )
    assert hyper.scalars().decay > 0, f"a weight decay that leaves nothing of the weights cannot be undone: {hyper}"


@torch.no_grad()
def adamw_correct_(tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
    """Make of the step just done by `adamw_step_` with `hyper` the one with `coefficient` times the gradient, in place.

    `tensors`: the state after the step, the gradient of the step (unclipped), and where the new rounded master goes.
    0 < coefficient < 1. At step 1 the moments are taken to have been zeros.

    How exact, against the clipped step done in the first place: at step 1 exp_avg and exp_avg_sq are bit-equal. Later
    they are off by a few roundings (2^-24) of the larger of the gradient's part and the old value, which is nothing for
    ordinary gradients. Relative to the clipped result it is much only where a single gradient dwarfed its own history:
    exp_avg_sq by at most 2^-23 / coefficient^2. An element with gradient 0 keeps its bits; with lr 0 the master does.
    Raises AssertionError for tensors that do not fit.
    """
    scalars, clipped = correction_scalars(hyper), clipped_scale(hyper, coefficient)
    check_exact(tensors)
    for_each_chunk(tensors, _CHUNK_CPU, _CHUNK_DEVICE, lambda part: _correct_chunk_(part, scalars, clipped))


@torch.no_grad()
def adamw_undo_(tensors: StepTensors, hyper: AdamWHyper) -> None:
    """Take the step just done by `adamw_step_` with `hyper` back, in place. `tensors` as in `adamw_correct_`.

    At step 1 the moments become zeros, exactly. Else the old state returns but for a few roundings of the state after
    the step. With lr 0 the master keeps its bits. Not possible after step 1 for a beta of 0 (the old moment left no
    trace, though it would not have mattered either), nor for lr * weight_decay of 1: AssertionError.
    """
    check_undo(hyper)
    check_exact(tensors)
    scalars = correction_scalars(hyper)
    for_each_chunk(tensors, _CHUNK_CPU, _CHUNK_DEVICE, lambda part: _undo_chunk_(part, scalars))


def _scaled(grad: Tensor, scale: float) -> Tensor:
    g = grad.float()
    return g if scale == 1.0 else g * scale


def _update(m: Tensor, v: Tensor, s: AdamWScalars) -> Tensor:
    """What the step added to the decayed master, to the bit."""
    denom = _sqrt(v).div_(_divisor(s.bias2_sqrt, v)).add_(s.eps)
    return (m * s.neg_step_size).div_(denom)


def _divisor(value: float, like: Tensor) -> Tensor:
    """A tensor: PyTorch's CUDA kernel turns division by a Python number into a product with its reciprocal."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _first_moment_before(m: Tensor, g: Tensor, c: CorrectionScalars) -> Tensor:
    if c.first_step:
        return torch.zeros_like(m)
    x = (m - g * c.step.one_minus_beta1).mul_(c.inverse_beta1)
    again = x + (g - x).mul_(c.step.one_minus_beta1)
    return x.add_((m - again).mul_(c.inverse_beta1))


def _decayed_second_moment(v: Tensor, g: Tensor, c: CorrectionScalars) -> Tensor:
    """beta2 times the second moment before; not negative, since rounding is monotonic: v is at least what was added."""
    if c.first_step:
        return torch.zeros_like(v)
    return v - (g * c.step.one_minus_beta2).mul_(g)


def _correct_chunk_(tensors: StepTensors, c: CorrectionScalars, clipped: float) -> None:
    s, p, m, v = c.step, tensors.master, tensors.exp_avg, tensors.exp_avg_sq
    g, g_clipped = _scaled(tensors.grad, s.grad_scale), _scaled(tensors.grad, clipped)
    m_before = _first_moment_before(m, g, c)
    same = g == 0
    m_clipped = m_before + (g_clipped - m_before).mul_(s.one_minus_beta1)
    m_clipped = torch.where(same, m, m_clipped)
    v_clipped = _decayed_second_moment(v, g, c).add_((g_clipped * s.one_minus_beta2).mul_(g_clipped))
    v_clipped = torch.where(same, v, v_clipped)
    if s.update:
        moved = (p - _update(m, v, s)).add_(_update(m_clipped, v_clipped, s))
        p.copy_(torch.where(same, p, moved))
    m.copy_(m_clipped)
    v.copy_(v_clipped)
    if tensors.param_out is not None:
        tensors.param_out.copy_(p)


def _undo_chunk_(tensors: StepTensors, c: CorrectionScalars) -> None:
    s, p, m, v = c.step, tensors.master, tensors.exp_avg, tensors.exp_avg_sq
    g = _scaled(tensors.grad, s.grad_scale)
    if s.update:
        p.sub_(_update(m, v, s)).div_(_divisor(s.decay, p))
    m_before = _first_moment_before(m, g, c)
    m.copy_(m_before)
    v_before = _decayed_second_moment(v, g, c)
    v.copy_(v_before if c.first_step else v_before.div_(_divisor(s.beta2, v)))
    if tensors.param_out is not None:
        tensors.param_out.copy_(p)
