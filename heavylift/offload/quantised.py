"""Moments as 8-bit codes with one float32 scale per block: block-wise dynamic quantisation (Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861), with other numbers and another rounding.

A block is 256 neighbouring elements (the last of a tensor may be shorter); its scale is the largest magnitude in it. A
value over its scale lies between 0 and 1, and is stored as one of the numbers of a `Grid`: a float with few bits, and
fewer the smaller it is. Powers of two, where the paper has powers of ten, so that a code is made by shifting bits.

`exp_avg`     a sign, and 0 or one of 127 magnitudes from 2^-29 to 1: 16 from a power of two to the next down to 2^-2,
              8 down to 2^-6, 4 down to 2^-14, then 2.
`exp_avg_sq`  0 or one of 255 numbers from 2^-59 to 1: 16 from a power of two to the next down to 2^-4, 8 down to 2^-12,
              4 down to 2^-28, then 2. Twice as many powers of two, because the step divides by the root.

Rounding is stochastic (`heavylift.offload.noise`): at beta2 0.999 a step moves a second moment by about a thousandth of
itself, and neighbours on the grid are 3% apart or more. Rounded to nearest, a second moment follows its block's scale
instead of its own gradients. One that is not 0 is never stored as 0, or a first moment would be divided by epsilon.

Values read from codes give the same scales and codes when they are stored again, rounded to nearest: states survive a
checkpoint. A block in which something is not finite becomes NaN. This is the specification; `native/quantised.h` is its
compiled twin. Left out: who owns the tensors (`heavylift.offload.states`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
_ONE = 127  # exponent field of 1.0
_FRACTION_BITS = 23


@dataclass(frozen=True)
class Grid:
    """The numbers between 0 and 1 that codes stand for: with 4 bits of fraction above 2^-ends[0], with 3 above
    2^-ends[1], with 2 above 2^-ends[2], else with 1. The highest code is 1, code 0 is 0."""

    ends: tuple[int, int, int]
    signed: bool
    """Whether the highest bit of a code is a sign."""

    @property
    def highest(self) -> int:
        """The code of 1."""
        return 127 if self.signed else 255

    def numbers(self) -> Tensor:
        """What each code stands for: float32 [256]."""
        bits = [0]
        for code in range(1, self.highest + 1):
            shortened, kept = code - self.highest + (_ONE << 4), 4
            for end in self.ends:
                if shortened < _ONE - end << kept:  # both count from 0 in steps of one binade's last bit
                    kept -= 1
                    shortened -= _ONE - end << kept
            bits.append(shortened << _FRACTION_BITS - kept)
        magnitudes = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        return torch.cat([magnitudes, -magnitudes]) if self.signed else magnitudes


EXP_AVG = Grid((2, 6, 14), True)
EXP_AVG_SQ = Grid((4, 12, 28), False)
GRIDS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


def num_blocks(numel: int) -> int:
    """Blocks, and so scales, of so many elements."""
    return -(-numel // BLOCK)


def block_pieces(segment_numels: Sequence[int], start: int, stop: int) -> list[slice]:
    """Where, among the blocks of the range [start, stop) of a flat layout, those of each segment lie: a segment begins
    with a block of its own, and so does what the range cuts off of one."""
    pieces, first, begin = [], 0, 0
    for numel in segment_numels:
        inside = max(0, min(begin + numel, stop) - max(begin, start))
        pieces.append(slice(first, first + num_blocks(inside)))
        first, begin = pieces[-1].stop, begin + numel
    return pieces


def block_scales(values: Tensor) -> Tensor:
    """The largest magnitude of each block, NaN above infinity: float32 [num_blocks(n)]. values: float32 [n]."""
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF  # ordered as the numbers are
    padding = num_blocks(values.numel()) * BLOCK - values.numel()
    padded = torch.nn.functional.pad(magnitudes, (0, padding)).view(-1, BLOCK)
    return padded.amax(1).view(torch.float32)


def decode(codes: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """What the codes stand for: float32 [n]. codes: uint8 [n]; scales: float32 [num_blocks(n)]."""
    return _numbers(grid, codes.device)[codes.int()].mul_(_for_each(scales, codes.numel()))


def encode(values: Tensor, scales: Tensor, grid: Grid, bits: Tensor | None) -> Tensor:
    """Codes of values under their scales: uint8 [n]. values: float32 [n], taken as magnitudes by a grid without sign.

    `bits`: integers [n] of which the low 16 bits say how each is rounded, such that the mean is kept; None: to nearest.
    """
    scale = _for_each(scales, values.numel())
    finite = scale.isfinite()
    x = values.abs().div_(scale).masked_fill_(~finite | (scale == 0), 0.0).view(torch.int32)
    exponent = x >> _FRACTION_BITS
    dropped = torch.full_like(x, _FRACTION_BITS - 4)
    code = torch.full_like(x, grid.highest - (_ONE << 4))
    for kept, end in zip((3, 2, 1), grid.ends, strict=True):
        smaller = (exponent < _ONE - end).int()
        dropped += smaller
        code += smaller * (_ONE - end << kept)
    # 16 bits as the middles of 65536 equal parts of the last bit that stays; carrying into the exponent is right
    if bits is None:
        x += torch.ones_like(x) << dropped - 1
    else:
        x += (bits & 0xFFFF).int().mul_(2).add_(1) << dropped - 17
    code += x >> dropped
    code = torch.maximum(code, torch.zeros_like(x) if grid.signed else (values != 0).int())
    if grid.signed:
        code |= torch.signbit(values).int() << 7
    return torch.where(finite, code, 0).to(torch.uint8)


@functools.cache
def _numbers(grid: Grid, device: torch.device) -> Tensor:
    return grid.numbers().to(device)


def _for_each(scales: Tensor, numel: int) -> Tensor:
    """Each element's scale: float32 [numel]."""
    return scales.repeat_interleave(BLOCK)[:numel]
