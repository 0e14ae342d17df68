"""How optimizer states are stored: the formats, and the way from each to the float32 values that the step works on.

`fp32`    master, exp_avg, exp_avg_sq as float32: 12 bytes per parameter.
`split`   the master as the bfloat16 parameter and the 16 bits that complete it: 10 bytes beside the parameter, and the
          same value to the bit. A bfloat16 rounded to nearest even and 16 more bits are not quite enough: of the two
          masters in the middle between r and its neighbours both round to an even r and have the same low bits. What
          is missing is one bit, whether the rounding went up, and the sign of exp_avg_sq, which is never negative,
          has room for it.
`bf16`    master in float32, moments in bfloat16: 8 bytes per parameter. Rounded to nearest, a second moment would stand
          still: at beta2 0.999 a step changes it by less than half of bfloat16's spacing. Stochastic rounding keeps its
          mean. The step itself computes with the moments before they are rounded.
`int8`    master in float32, moments as 8-bit codes with a scale per block of 256 (`heavylift.offload.quantised`): 6
          bytes per parameter and 8 per block. Rounded stochastically too, for the same reason.

This is the specification in plain PyTorch, on any device; `native/formats.h` is its compiled twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from heavylift.config.schema import StateFormat
from heavylift.offload.noise import noise_bits, round_stochastically
from heavylift.offload.quantised import GRIDS, block_scales, decode, encode
from heavylift.offload.tensors import MOMENTS, StepTensors

STORED_DTYPES: dict[StateFormat, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    StateFormat.FP32: (torch.float32, torch.float32, torch.float32),
    StateFormat.SPLIT: (torch.int16, torch.float32, torch.float32),
    StateFormat.BF16: (torch.float32, torch.bfloat16, torch.bfloat16),
    StateFormat.INT8: (torch.float32, torch.uint8, torch.uint8),
}
"""In what dtypes master, exp_avg and exp_avg_sq are kept; with `split` the first is the low half of the master. `int8`
keeps scales besides."""

# elements of int8 states worked on at a time: their temporaries take some 50 bytes an element
_CHUNK_CODED = 2**22


def check_format(state_format: StateFormat, dtypes: set[torch.dtype]) -> None:
    """Raises ValueError where parameters of these dtypes cannot have their states in that format."""
    if state_format is StateFormat.SPLIT and dtypes - {torch.bfloat16}:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"state format split needs bfloat16 parameters, which are half of its masters; got {found}")


def join_masters(param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The float32 masters. param: bfloat16 [n]; low: int16 [n]; exp_avg_sq: float32 [n], of which the sign counts."""
    rounded = param.view(torch.int16).to(torch.int32)
    high = rounded - torch.signbit(exp_avg_sq).to(torch.int32)
    return ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def low_halves(master: Tensor) -> Tensor:
    """The 16 bits below a bfloat16, int16 [n]. master: float32 [n]."""
    return master.view(torch.int32).to(torch.int16)  # narrowing keeps the low bits


def rounds_up(master: Tensor, param: Tensor) -> Tensor:
    """Whether `param`, the rounded `master`, is further from zero than its high half: bool [n]. False for NaN."""
    up = (param.view(torch.int16).to(torch.int32) - (master.view(torch.int32) >> 16)) & 1
    return up.bool() & ~master.isnan()


def mark_signs_(exp_avg_sq: Tensor, up: Tensor) -> None:
    """Writes `up` (bool [n]) into the signs of exp_avg_sq (float32 [n])."""
    exp_avg_sq.abs_()
    bits = exp_avg_sq.view(torch.int32)
    bits.bitwise_or_(up.to(torch.int32) << 31)


@contextmanager
def unpacked(tensors: StepTensors) -> Iterator[StepTensors]:
    """The same states in float32; what is in them at the end of the context is stored. `param_out` holds the parameters
    at the beginning (formats that need them) and the rounded masters at the end."""
    if tensors.state_format is StateFormat.FP32:
        yield tensors
        return
    if tensors.state_format is StateFormat.BF16:
        assert tensors.noise is not None
        exp_avg, exp_avg_sq = tensors.exp_avg.float(), tensors.exp_avg_sq.float()
        yield replace(tensors, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, state_format=StateFormat.FP32, noise=None)
        bits = noise_bits(tensors.noise, exp_avg.numel(), exp_avg.device)
        tensors.exp_avg.copy_(round_stochastically(exp_avg, bits))
        tensors.exp_avg_sq.copy_(round_stochastically(exp_avg_sq, bits >> 16))
        return
    if tensors.state_format is StateFormat.INT8:
        with _decoded(tensors) as plain:
            yield plain
        return
    assert tensors.param_out is not None
    master = join_masters(tensors.param_out, tensors.master, tensors.exp_avg_sq)
    tensors.exp_avg_sq.abs_()
    yield replace(tensors, master=master, state_format=StateFormat.FP32)
    tensors.master.copy_(low_halves(master))
    mark_signs_(tensors.exp_avg_sq, rounds_up(master, tensors.param_out))


@contextmanager
def _decoded(tensors: StepTensors) -> Iterator[StepTensors]:
    assert tensors.noise is not None and tensors.scales is not None
    stored = [
        (codes, scales, GRIDS[name])
        for name, codes, scales in zip(MOMENTS, (tensors.exp_avg, tensors.exp_avg_sq), tensors.scales, strict=True)
    ]
    moments = [decode(codes, scales, grid) for codes, scales, grid in stored]
    exp_avg, exp_avg_sq = moments
    yield StepTensors(tensors.master, exp_avg, exp_avg_sq, tensors.grad, tensors.param_out)
    bits = noise_bits(tensors.noise, exp_avg.numel(), exp_avg.device).int()
    for (codes, scales, grid), values, shift in zip(stored, moments, (0, 16), strict=True):
        scales.copy_(block_scales(values))
        codes.copy_(encode(values, scales, grid, bits >> shift))


def for_each_chunk(
    tensors: StepTensors, chunk_cpu: int, chunk_device: int, work: Callable[[StepTensors], None]
) -> None:
    """Does `work` on the float32 states of ranges of at most so many elements, by device. Raises AssertionError for
    tensors that do not fit."""
    tensors.check()
    chunk = chunk_cpu if tensors.master.device.type == "cpu" else chunk_device
    if tensors.state_format is StateFormat.INT8:
        chunk = min(chunk, _CHUNK_CODED)  # a multiple of a block
    for start in range(0, tensors.master.numel(), chunk):
        with unpacked(tensors.part(slice(start, start + chunk))) as part:
            work(part)
