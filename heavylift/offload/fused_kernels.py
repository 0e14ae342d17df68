"""The Triton kernels of `heavylift.offload.fused_gpu`: a step, the steps of a table, revisions of a step, and sums of
squares.

The sequence of operations is that of `heavylift.offload.adamw`, once for all kernels that step. Whoever launches them
switches fused multiply-adds off.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def _adamw_block(  # type: ignore[no-untyped-def]
    master_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    param_ptr,
    offsets,
    mask,
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
):
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
def adamw_kernel(  # type: ignore[no-untyped-def]
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
    """`adamw_step_` of one part: program i does elements i * BLOCK to (i + 1) * BLOCK, read and written once.

    All flat, [numel]: master float32 (SPLIT: int16, the low halves), exp_avg and exp_avg_sq float32 (SPLIT: the sign of
    the latter says which way the parameter was rounded), grad and param of any float dtype (SPLIT: param bfloat16), the
    parameter written from the new master. Factors are those of `heavylift.offload.adamw.AdamWScalars`, float32.
    UPDATE false: only the moments move.
    """
    # 64-bit offsets: a part may have more than 2**31 elements
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _adamw_block(
        master_ptr,
        exp_avg_ptr,
        exp_avg_sq_ptr,
        grad_ptr,
        param_ptr,
        offsets,
        offsets < numel,
        grad_scale,
        decay,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        bias2_sqrt,
        eps,
        neg_step_size,
        UPDATE,
        SPLIT,
    )


@triton.jit(do_not_specialize=["num_rows"])
def adamw_table_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    num_rows,
    grad_scale,
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias2_sqrt,
    eps,
    neg_step_size,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    UPDATE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`adamw_kernel` of many parts in one launch: each program finds its row in the table and does a block of it.

    table: int64 [7 * num_rows], `heavylift.offload.fused_gpu._Table.columns`, one column after the other. GRAD, PARAM:
    dtypes of all rows. 2**SEARCH_STEPS is at least num_rows. ALIGNED: addresses and numbers of elements are multiples
    of 16. The rest as there.
    """
    # the row of this program: the last one that begins at or before it
    program = tl.program_id(0).to(tl.int64)
    row = tl.program_id(0) * 0
    for step in tl.static_range(SEARCH_STEPS):
        candidate = row + (1 << (SEARCH_STEPS - 1 - step))
        inside = candidate < num_rows
        first = tl.load(table_ptr + candidate, mask=inside, other=0)
        row = tl.where(inside & (first <= program), candidate, row)
    column_ptr = table_ptr + row
    offsets = (program - tl.load(column_ptr)) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(column_ptr + num_rows)
    master_ptr = tl.load(column_ptr + 2 * num_rows)
    if SPLIT:
        master_ptr = master_ptr.to(tl.pointer_type(tl.int16))
    else:
        master_ptr = master_ptr.to(tl.pointer_type(tl.float32))
    exp_avg_ptr = tl.load(column_ptr + 3 * num_rows).to(tl.pointer_type(tl.float32))
    exp_avg_sq_ptr = tl.load(column_ptr + 4 * num_rows).to(tl.pointer_type(tl.float32))
    grad_ptr = tl.load(column_ptr + 5 * num_rows).to(tl.pointer_type(GRAD))
    param_ptr = tl.load(column_ptr + 6 * num_rows).to(tl.pointer_type(PARAM))
    if ALIGNED:  # what Triton finds out by itself where these are arguments: it makes the loads 128 bits wide
        numel = tl.multiple_of(numel, 16)
        master_ptr = tl.multiple_of(master_ptr, 16)
        exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 16)
        exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        param_ptr = tl.multiple_of(param_ptr, 16)
    _adamw_block(
        master_ptr,
        exp_avg_ptr,
        exp_avg_sq_ptr,
        grad_ptr,
        param_ptr,
        offsets,
        offsets < numel,
        grad_scale,
        decay,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        bias2_sqrt,
        eps,
        neg_step_size,
        UPDATE,
        SPLIT,
    )


@triton.jit
def revise_kernel(  # type: ignore[no-untyped-def]
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
    """Takes a step back (UNDO: `adamw_undo_`) or makes it one with clipped gradients (`adamw_correct_`).

    Tensors and factors as in `adamw_kernel`, after the step; grad, and grad_scale with it, are those of that step.
    clipped_scale: the gradient's factor with clipping, unused by UNDO; inverse_beta1: 1 / beta1, 0 for beta1 0.
    FIRST_STEP: the moments were zero before. Formulas: `heavylift.offload.correction`.
    """
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
def sum_squares_kernel(x_ptr, partial_ptr, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program sums BLOCK * BLOCKS squares. x: [numel], any float dtype; partial: float64 [programs]."""
    start = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for block in range(BLOCKS):
        offsets = start + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < numel, other=0.0).to(tl.float32).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))
