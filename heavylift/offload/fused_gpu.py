"""The AdamW step on the GPU as one kernel: one read and one write of each state.

Bit-equal to `heavylift.offload.adamw.adamw_step_`: fused multiply-adds are switched off, division and square root are
the correctly rounded ones. The plain version reads and writes every temporary: about five times the traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper, AdamWScalars
from heavylift.offload.formats import for_each_chunk
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.tensors import StepTensors

_BLOCK = 4096
_UNPACKED_ELEMENTS = 2**25
_SUM_BLOCK, _SUM_BLOCKS = 1024, 16


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]  # Triton's compiler reads this signature, not Python's types
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
    BLOCK: tl.constexpr,
):
    # 64-bit offsets: a part may have more than 2**31 elements
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32) * grad_scale
    m = tl.load(exp_avg_ptr + offsets, mask=mask)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
    p = tl.load(master_ptr + offsets, mask=mask)
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)
    if UPDATE:
        denom = tl.div_rn(tl.sqrt_rn(v), bias2_sqrt + tl.zeros_like(v)) + eps
        p = p * decay + tl.div_rn(m * neg_step_size, denom)
        tl.store(master_ptr + offsets, p, mask=mask)
    tl.store(param_ptr + offsets, p.to(param_ptr.dtype.element_ty), mask=mask)


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
    """The fused step, and the norm in one pass."""

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
        """See `adamw_step_`; runs on the current stream. States that are not stored as float32 are unpacked into
        temporaries, so many elements at a time."""
        s = hyper.scalars()
        whole = max(1, tensors.master.numel())
        chunk = whole if tensors.state_format is StateFormat.FP32 else _UNPACKED_ELEMENTS
        for_each_chunk(tensors, chunk, chunk, lambda part: self._launch(part, s))

    def _launch(self, tensors: StepTensors, s: AdamWScalars) -> None:
        assert tensors.param_out is not None, "the device tier writes its parameters"
        numel = tensors.master.numel()
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
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
