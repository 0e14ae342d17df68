"""Parking: optimizer states of the device tier on the host for a while, so that others can have the device's memory.

    parked = ParkedStates(optimizer)
    parked.put_away({"exp_avg", "exp_avg_sq"}, pin_memory=True)
    ...                                       # reading, writing and saving states work; stepping does not
    parked.bring_back()

Bits do not change. Left out: the host tier, which is there already, parameters, gradients and their accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch

from heavylift.config.schema import Tier
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.states import STATE_NAMES, Part
from heavylift.offload.tensors import MOMENTS
from heavylift.offload.tiers import HostSlab, aligned_bytes


class ParkedStates:
    """Which states of one optimizer are away from the device. Not while a step, or a backward that takes it, runs."""

    def __init__(self, optimizer: TieredAdamW) -> None:
        self._optimizer = optimizer
        self._slabs: dict[str, HostSlab] = {}
        """By the name of the state."""

    @property
    def names(self) -> Set[str]:
        """The states (of `STATE_NAMES`) that are away."""
        return self._slabs.keys()

    @torch.no_grad()
    def put_away(self, names: Set[str], pin_memory: bool) -> None:
        """Moves these states to the host, on CUDA into page-locked memory if asked. What is away already stays there.

        Raises MemoryError where the host refuses memory: what it has refused stays on the device.
        """
        assert names <= set(STATE_NAMES), f"{names=}"
        self._optimizer.synchronize()
        usage = self._optimizer.usage
        for name in sorted(names - self.names):
            parts = list(self._device_parts())
            num_bytes = sum(aligned_bytes(t.numel(), t.dtype) for part in parts for t in _tensors(part, name))
            on_gpu = any(part.group.device.type == "cuda" for part in parts)
            slab = HostSlab(num_bytes, pinned=pin_memory and on_gpu, usage=usage)
            for part in parts:
                tensors = _tensors(part, name)
                _replace(part, name, [slab.take(t.numel(), t.dtype).copy_(t) for t in tensors])
                usage.device_bytes -= sum(t.nbytes for t in tensors)
            self._slabs[name] = slab

    @torch.no_grad()
    def bring_back(self) -> None:
        """Moves all of them to where they belong. Raises torch.OutOfMemoryError where the device has no room; call it
        again then."""
        usage = self._optimizer.usage
        for name, slab in list(self._slabs.items()):
            for part in self._device_parts():
                tensors = _tensors(part, name)
                # a tensor of its own also on the CPU, where the device is the host
                _replace(part, name, [t.to(part.group.device, copy=True) for t in tensors])
                usage.device_bytes += sum(t.nbytes for t in tensors)
            slab.close()
            usage.host_bytes -= slab.num_bytes
            usage.pinned_bytes -= slab.num_bytes if slab.is_pinned else 0
            del self._slabs[name]

    def _device_parts(self) -> Iterator[Part]:
        yield from (part for parts in self._optimizer.parts for part in parts if part.tier is Tier.DEVICE)


def _tensors(part: Part, name: str) -> list[torch.Tensor]:
    """The state as it is stored; a moment with the scales of its blocks."""
    stored: list[torch.Tensor] = [getattr(part, name)]
    if name in MOMENTS and part.scales is not None:
        stored.append(part.scales[MOMENTS.index(name)])
    return stored


def _replace(part: Part, name: str, tensors: list[torch.Tensor]) -> None:
    setattr(part, name, tensors[0])
    if name in MOMENTS and part.scales is not None:
        first, second = part.scales
        part.scales = (tensors[1], second) if name == MOMENTS[0] else (first, tensors[1])
