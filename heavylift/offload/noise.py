"""Random bits for stochastic rounding, as a pure function of where they are used.

A number depends on the parameter's name, the step and the element's index in the whole parameter, and on nothing else:
not on threads, tiers, ranks, or in what order work is done. So every kernel and every division of the work computes the
same bits. Indices are taken modulo 2^32.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: neighbours land far apart


@dataclass(frozen=True)
class Noise:
    """Of a run of neighbouring elements of one parameter, at one step."""

    key: int
    """32 bits, of the parameter and the step."""
    first: int
    """Index of the run's first element in the whole parameter."""

    def advanced(self, num_elements: int) -> Noise:
        """Of the run that begins so many elements later."""
        return replace(self, first=self.first + num_elements)


def noise_of(name: str, step: int, first: int) -> Noise:
    """The noise of the elements from `first` on of the parameter `name`, at a step counted from 1."""
    return Noise(_mix((_mix(zlib.crc32(name.encode())) + step) & _MASK), first)


def _mix(x: int) -> int:
    """`lowbias32` by Chris Wellons (hash-prospector, in the public domain): a permutation of 32-bit numbers in which
    every bit of the result depends on every bit of `x`."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def noise_bits(noise: Noise, numel: int, device: torch.device) -> Tensor:
    """32 random bits for each element: int64 [numel], from 0 below 2^32."""
    index = torch.arange(numel, dtype=torch.int64, device=device).add_(noise.first).bitwise_and_(_MASK)
    x = index.mul_(_GOLDEN).add_(noise.key).bitwise_and_(_MASK)  # products wrap; their low 32 bits are right
    x ^= x >> 16
    x.mul_(0x7FEB352D).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(0x846CA68B).bitwise_and_(_MASK)
    return x ^ (x >> 16)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """One of the two bfloat16 around each value, the nearer one more often, so that the mean is the value; [n].

    values: float32 [n]; bits: integers [n] of which the low 16 bits count. A bfloat16 stays itself; what is not finite
    is rounded to nearest.
    """
    sum_bits = values.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (sum_bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.bfloat16())
