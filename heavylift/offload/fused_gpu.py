"""AdamW on the GPU as one kernel: one read and one write of each state, for the step and for taking it back.

Bit-equal to `heavylift.offload.adamw.adamw_step_` and to `adamw_correct_` and `adamw_undo_` of
`heavylift.offload.correction`: fused multiply-adds are switched off, division and square root are the correctly rounded
ones. The plain version reads and writes every temporary: about five times the traffic. The formats `fp32` and `split`
are read and written where they lie; others are unpacked into temporaries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper, AdamWScalars
from heavylift.offload.correction import (
    CorrectionScalars,
    check_exact,
    check_undo,
    clipped_scale,
    correction_scalars,
)
from heavylift.offload.formats import for_each_chunk
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.tensors import StepTensors

_BLOCK = 4096
_REVISE_BLOCK = 2048  # more values of each element are alive at once
_UNPACKED_ELEMENTS = 2**22  # temporaries of about 40 bytes each, which no plan counts
_SUM_BLOCK, _SUM_BLOCKS = 1024, 16

# Triton's compiler reads the signatures below, not Python's types


@triton.jit
def _load_master(master_ptr, param_ptr, v_bits, offsets, mask, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:  # `heavylift.offload.formats.join_masters`
        low = tl.load(master_ptr + offsets, mask=mask).to(tl.int32) & 0xFFFF
        rounded = tl.load(param_ptr + offsets, mask=mask).to(tl.int16, bitcast=True).to(tl.int32)
        went_up = (v_bits >> 31) & 1
        master = (((rounded - went_up) << 16) | low).to(tl.float32, bitcast=True)
    else:
        master = tl.load(master_ptr + offsets, mask=mask)
    return master


@triton.jit
def _store_second_moment(exp_avg_sq_ptr, v, p, offsets, mask, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:  # `mark_signs_`, `rounds_up`
        param_bits = p.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        went_up = (param_bits - (p.to(tl.int32, bitcast=True) >> 16)) & 1
        went_up = tl.where(p == p, went_up, 0)
        bits = (v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (went_up << 31)
        tl.store(exp_avg_sq_ptr + offsets, bits.to(tl.float32, bitcast=True), mask=mask)
    else:
        tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)


@triton.jit
def _store_master(master_ptr, param_ptr, p, offsets, mask, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:  # `low_halves`
        tl.store(master_ptr + offsets, p.to(tl.int32, bitcast=True).to(tl.int16), mask=mask)
    else:
        tl.store(master_ptr + offsets, p, mask=mask)
    tl.store(param_ptr + offsets, p.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _update(m, v, bias2_sqrt, eps, neg_step_size):  # type: ignore[no-untyped-def]
    denom = tl.div_rn(tl.sqrt_rn(v), bias2_sqrt + tl.zeros_like(v)) + eps
    return tl.div_rn(m * neg_step_size, denom)


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    master_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    param_ptr,
    numel,
    grad_scale,
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias2_sqrt,
    eps,
    neg_step_size,
    UPDATE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit offsets: a part may have more than 2**31 elements
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32) * grad_scale
    m = tl.load(exp_avg_ptr + offsets, mask=mask)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
    p = _load_master(master_ptr, param_ptr, v.to(tl.int32, bitcast=True), offsets, mask, SPLIT)
    if SPLIT:
        v = tl.abs(v)
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    if UPDATE:
        p = p * decay + _update(m, v, bias2_sqrt, eps, neg_step_size)
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    _store_second_moment(exp_avg_sq_ptr, v, p, offsets, mask, SPLIT)
    _store_master(master_ptr, param_ptr, p, offsets, mask, SPLIT)


@triton.jit
def _revise_kernel(  # type: ignore[no-untyped-def]
    master_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    param_ptr,
    numel,
    grad_scale,
    clipped_scale,
    decay,
    one_minus_beta1,
    inverse_beta1,
    beta2,
    one_minus_beta2,
    bias2_sqrt,
    eps,
    neg_step_size,
    UPDATE: tl.constexpr,
    UNDO: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    unscaled = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    g = unscaled * grad_scale
    m = tl.load(exp_avg_ptr + offsets, mask=mask)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
    p = _load_master(master_ptr, param_ptr, v.to(tl.int32, bitcast=True), offsets, mask, SPLIT)
    if SPLIT:
        v = tl.abs(v)
    if FIRST_STEP:
        m_before = tl.zeros_like(m)
        v_decayed = tl.zeros_like(v)
    else:
        x = (m - g * one_minus_beta1) * inverse_beta1
        again = x + (g - x) * one_minus_beta1
        m_before = x + (m - again) * inverse_beta1
        v_decayed = v - (g * one_minus_beta2) * g
    if UNDO:
        if UPDATE:
            p = tl.div_rn(p - _update(m, v, bias2_sqrt, eps, neg_step_size), decay + tl.zeros_like(p))
        m = m_before
        v = v_decayed
        if not FIRST_STEP:
            v = tl.div_rn(v_decayed, beta2 + tl.zeros_like(v))
    else:
        clipped = unscaled * clipped_scale
        same = g == 0
        m_clipped = m_before + (clipped - m_before) * one_minus_beta1
        m_clipped = tl.where(same, m, m_clipped)
        v_clipped = v_decayed + (clipped * one_minus_beta2) * clipped
        v_clipped = tl.where(same, v, v_clipped)
        if UPDATE:
            moved = p - _update(m, v, bias2_sqrt, eps, neg_step_size)
            moved = moved + _update(m_clipped, v_clipped, bias2_sqrt, eps, neg_step_size)
            p = tl.where(same, p, moved)
        m = m_clipped
        v = v_clipped
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    _store_second_moment(exp_avg_sq_ptr, v, p, offsets, mask, SPLIT)
    _store_master(master_ptr, param_ptr, p, offsets, mask, SPLIT)


@triton.jit
def _sum_squares_kernel(x_ptr, partial_ptr, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for block in range(BLOCKS):
        offsets = start + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < numel, other=0.0).to(tl.float32).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))


class FusedGpuKernel(PlainKernel):
    """The fused step and its revisions, and the norm in one pass."""

    def sum_squares(self, tensor: torch.Tensor) -> torch.Tensor:
        """float64 throughout. PyTorch's `vector_norm(dtype=float64)` first writes a float64 copy: ten times the
        traffic of a bfloat16 gradient, and 5% of a whole step of an 8B model on two H200."""
        numel = tensor.numel()
        if numel == 0 or not tensor.is_contiguous():
            return super().sum_squares(tensor)
        num_programs = triton.cdiv(numel, _SUM_BLOCK * _SUM_BLOCKS)
        partial = torch.empty(num_programs, dtype=torch.float64, device=tensor.device)
        _sum_squares_kernel[(num_programs,)](tensor, partial, numel, BLOCK=_SUM_BLOCK, BLOCKS=_SUM_BLOCKS, num_warps=4)
        # one partial sum per program, added in a fixed order: the same bits every time
        return partial.sum()

    def step(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """See `adamw_step_`; runs on the current stream."""
        s = hyper.scalars()
        if tensors.state_format in _READ_IN_PLACE:
            tensors.check()
            self._launch_step(tensors, s)
        else:
            chunk = _UNPACKED_ELEMENTS
            for_each_chunk(tensors, chunk, chunk, lambda part: self._launch_step(part, s))

    def correct(self, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
        """See `adamw_correct_`; runs on the current stream."""
        check_exact(tensors)
        tensors.check()
        self._launch_revision(tensors, correction_scalars(hyper), clipped_scale(hyper, coefficient), undo=False)

    def undo(self, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """See `adamw_undo_`; runs on the current stream."""
        check_undo(hyper)
        check_exact(tensors)
        tensors.check()
        self._launch_revision(tensors, correction_scalars(hyper), 0.0, undo=True)

    def _launch_step(self, tensors: StepTensors, s: AdamWScalars) -> None:
        assert tensors.param_out is not None, "the device tier writes its parameters"
        numel = tensors.master.numel()
        if numel == 0:
            return
        _adamw_kernel[(triton.cdiv(numel, _BLOCK),)](
            tensors.master,
            tensors.exp_avg,
            tensors.exp_avg_sq,
            tensors.grad,
            tensors.param_out,
            numel,
            s.grad_scale,
            s.decay,
            s.one_minus_beta1,
            s.beta2,
            s.one_minus_beta2,
            s.bias2_sqrt,
            s.eps,
            s.neg_step_size,
            UPDATE=s.update,
            SPLIT=tensors.state_format is StateFormat.SPLIT,
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def _launch_revision(self, tensors: StepTensors, c: CorrectionScalars, clipped: float, *, undo: bool) -> None:
        assert tensors.param_out is not None, "the device tier writes its parameters"
        numel, s = tensors.master.numel(), c.step
        if numel == 0:
            return
        _revise_kernel[(triton.cdiv(numel, _REVISE_BLOCK),)](
            tensors.master,
            tensors.exp_avg,
            tensors.exp_avg_sq,
            tensors.grad,
            tensors.param_out,
            numel,
            s.grad_scale,
            clipped,
            s.decay,
            s.one_minus_beta1,
            c.inverse_beta1,
            s.beta2,
            s.one_minus_beta2,
            s.bias2_sqrt,
            s.eps,
            s.neg_step_size,
            UPDATE=s.update,
            UNDO=undo,
            FIRST_STEP=c.first_step,
            SPLIT=tensors.state_format is StateFormat.SPLIT,
            BLOCK=_REVISE_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )


_READ_IN_PLACE = (StateFormat.FP32, StateFormat.SPLIT)
