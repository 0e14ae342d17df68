"""The AdamW step on the GPU as one kernel: one read and one write of each state.

Bit-equal to `heavylift.offload.adamw.adamw_step_`: fused multiply-adds are switched off, division and square root are
the correctly rounded ones. The plain version reads and writes every temporary: about five times the traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heavylift.offload.adamw import AdamWHyper, check_step_tensors
from heavylift.offload.kernels import PlainKernel

_BLOCK = 4096


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


class FusedGpuKernel(PlainKernel):
    """The fused step; sums and norms are plain PyTorch, which is fused enough there."""

    def step(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        param_out: torch.Tensor,
        hyper: AdamWHyper,
    ) -> None:
        """See `adamw_step_`; runs on the current stream."""
        check_step_tensors(master, exp_avg, exp_avg_sq, grad, param_out)
        s = hyper.scalars()
        numel = master.numel()
        if numel == 0:
            return
        _adamw_kernel[(triton.cdiv(numel, _BLOCK),)](
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            param_out,
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
