"""AdamW on the GPU as one kernel: one read and one write of each state, for the step and for taking it back.

Bit-equal to `heavylift.offload.adamw.adamw_step_` and to `adamw_correct_` and `adamw_undo_` of
`heavylift.offload.correction`: fused multiply-adds are switched off, division and square root are the correctly rounded
ones. The plain version reads and writes every temporary: about five times the traffic. The formats `fp32` and `split`
are read and written where they lie; others are unpacked into temporaries.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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
from heavylift.offload.fused_kernels import adamw_kernel, adamw_table_kernel, revise_kernel, sum_squares_kernel
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.tensors import StepTensors
from heavylift.transfer import to_device

_BLOCK = 4096
_NARROW_BLOCK = 1024  # where loads are not 128 bits wide: of 4096 so few programs fit on the GPU at once that it waits
_REVISE_BLOCK = 2048  # more values of each element are alive at once
_UNPACKED_ELEMENTS = 2**22  # temporaries of about 40 bytes each, which no plan counts
_SUM_BLOCK, _SUM_BLOCKS = 1024, 16


class _Call(NamedTuple):
    """What the rows of one launch have in common: the kernel is compiled for it."""

    state_format: StateFormat
    grad: torch.dtype
    param: torch.dtype
    aligned: bool
    """Every address is a multiple of 16, and so is the number of elements."""

    @property
    def block(self) -> int:
        """Elements of one program."""
        return _BLOCK if self.aligned else _NARROW_BLOCK


def _calls(tensors: Iterable[StepTensors]) -> dict[_Call, list[StepTensors]]:
    """In which launch each is a row. What lies aligned and ends oddly makes two: its end must not slow it down."""
    calls: dict[_Call, list[StepTensors]] = {}
    for one in tensors:
        assert one.param_out is not None, "the device tier writes its parameters"
        one.check()
        numel, kind = one.master.numel(), (one.state_format, one.grad.dtype, one.param_out.dtype)
        addresses = one.master.data_ptr() | one.exp_avg.data_ptr() | one.exp_avg_sq.data_ptr()
        addresses |= one.grad.data_ptr() | one.param_out.data_ptr()
        even = numel - numel % _ALIGNMENT if addresses % _ALIGNMENT == 0 else 0
        if even > 0:
            row = one if even == numel else one.part(slice(0, even))
            calls.setdefault(_Call(*kind, aligned=True), []).append(row)
        if even < numel:
            row = one if even == 0 else one.part(slice(even, numel))
            calls.setdefault(_Call(*kind, aligned=False), []).append(row)
    return calls


@dataclass(frozen=True)
class _Table:
    """What `adamw_table_kernel` reads."""

    call: _Call
    rows: Sequence[StepTensors]
    """Kept until the launch: the table has but their addresses."""
    columns: torch.Tensor
    """int64 [7 * rows] on the device: the first program of each row, then its numbers of elements, and the addresses of
    master, exp_avg, exp_avg_sq, grad and param_out. Column by column: the search reads neighbouring addresses."""
    num_programs: int
    """Each does a block of one row."""

    @classmethod
    def of(cls, rows: Sequence[StepTensors], call: _Call) -> _Table:
        """Goes up on the current stream; nobody waits for it."""
        numels = [row.master.numel() for row in rows]
        programs = list(accumulate((-(-numel // call.block) for numel in numels), initial=0))
        columns = array("q", programs[:-1])
        columns.extend(numels)
        columns.extend(row.master.data_ptr() for row in rows)
        columns.extend(row.exp_avg.data_ptr() for row in rows)
        columns.extend(row.exp_avg_sq.data_ptr() for row in rows)
        columns.extend(row.grad.data_ptr() for row in rows)
        columns.extend(row.param_out.data_ptr() for row in rows if row.param_out is not None)
        on_device = to_device(torch.frombuffer(columns, dtype=torch.int64), rows[0].master.device)
        return cls(call, rows, on_device, programs[-1])


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
        sum_squares_kernel[(num_programs,)](tensor, partial, numel, BLOCK=_SUM_BLOCK, BLOCKS=_SUM_BLOCKS, num_warps=4)
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

    def prepare_all(self, tensors: Sequence[StepTensors]) -> Callable[[AdamWHyper], None]:
        """The tables go up on the current stream of their common device: what is left is one launch.

        Several launches where dtypes, formats or alignment differ; one by one in formats that must be unpacked.
        """
        unpacked = [one for one in tensors if one.state_format not in _READ_IN_PLACE]
        calls = _calls(one for one in tensors if one.state_format in _READ_IN_PLACE)
        tables = [_Table.of(rows, call) for call, rows in calls.items()]

        def step(hyper: AdamWHyper) -> None:
            scalars = hyper.scalars()
            for table in tables:
                self._launch_table(table, scalars)
            for one in unpacked:
                self.step(one, hyper)

        return step

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
        adamw_kernel[(triton.cdiv(numel, _BLOCK),)](
            tensors.master,
            tensors.exp_avg,
            tensors.exp_avg_sq,
            tensors.grad,
            tensors.param_out,
            numel,
            *_factors(s),
            UPDATE=s.update,
            SPLIT=tensors.state_format is StateFormat.SPLIT,
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def _launch_table(self, table: _Table, s: AdamWScalars) -> None:
        call = table.call
        adamw_table_kernel[(table.num_programs,)](
            table.columns,
            len(table.rows),
            *_factors(s),
            GRAD=_TRITON_DTYPES[call.grad],
            PARAM=_TRITON_DTYPES[call.param],
            SEARCH_STEPS=(len(table.rows) - 1).bit_length(),
            ALIGNED=call.aligned,
            UPDATE=s.update,
            SPLIT=call.state_format is StateFormat.SPLIT,
            BLOCK=call.block,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def _launch_revision(self, tensors: StepTensors, c: CorrectionScalars, clipped: float, *, undo: bool) -> None:
        assert tensors.param_out is not None, "the device tier writes its parameters"
        numel, s = tensors.master.numel(), c.step
        if numel == 0:
            return
        revise_kernel[(triton.cdiv(numel, _REVISE_BLOCK),)](
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


def _factors(s: AdamWScalars) -> tuple[float, ...]:
    """As both kernels of a step take them."""
    return (
        s.grad_scale,
        s.decay,
        s.one_minus_beta1,
        s.beta2,
        s.one_minus_beta2,
        s.bias2_sqrt,
        s.eps,
        s.neg_step_size,
    )


_READ_IN_PLACE = (StateFormat.FP32, StateFormat.SPLIT)
_ALIGNMENT = 16  # bytes of an address, and elements: what Triton needs to know for loads of 128 bits
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
