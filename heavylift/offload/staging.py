"""Page-locked staging between the tiers, bounded whatever the size of the model.

A host part is stepped piece by piece through the places of a ring: gradients that lie on the device, and parameters
that are half of split masters, come down into one, and the new parameters leave from there. Beside a GPU the place that
became free last is used next (native/pieces.h), before the processor's last-level cache has lost it: this traffic need
not go through the host's memory, which is what limits a step on many cores; 20 of 26 bytes per parameter are left with
`split` states. The other places are for pieces that an interrupted thread holds. Small copies also leave gaps: a copy
engine serves one stream until nothing more of it is ready, and FSDP2's small tables for gathering and scattering go up
in the compute stream, which stands still for as long as copies of other streams take in one go.

Accumulation has a place of its own, for the float32 gradients of one host part. (Overlapped schedules may keep all
gradients of a step on the host instead: `heavylift.offload.overlap`.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heavylift.offload.quantised import BLOCK
from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes

PIECE_NUMEL = 2**20
"""Elements of a piece: copies of 40 microseconds, several times as long apart."""
NUM_SLOTS = 40
"""Pieces on their way down, being stepped and on their way up at one time. A thread that the training program
interrupts keeps its piece for a time slice of some three milliseconds, in which fifteen others step as many pieces:
with few places they would wait for it. Some ten are in use while nobody is interrupted."""
MAX_AHEAD = 6
"""Pieces on their way down, or there, beyond those that are being stepped."""


@dataclass(eq=False)
class Slot:
    """One place of the ring."""

    param_host: torch.Tensor
    """Parameters of a piece, flat, in their dtype."""
    grad_host: torch.Tensor | None
    """Its gradients, in the parameters' dtype; None where they lie on the host already."""
    fetched: torch.cuda.Event | None
    """Behind the copies down into this place."""
    sent: torch.cuda.Event | None
    """Behind the last copy up out of it: it is filled again only after that."""


@dataclass(frozen=True)
class RingSize:
    """What a ring has to hold, from which its bytes follow: the plan and the ring itself ask here."""

    numel: int
    """Elements of the largest host part that passes through."""
    dtype: torch.dtype
    """Of the parameters and their gradients."""
    steps: bool
    """Whether the CPU steps anything: else gradients that are added up come down here, and nothing else."""
    fetches_grads: bool
    """Whether gradients come down piece by piece."""
    accumulates: bool
    """Whether gradients come down to be added up, in float32."""

    @property
    def piece_numel(self) -> int:
        """Elements of a place: whole blocks of codes."""
        return min(PIECE_NUMEL, -(-self.numel // BLOCK) * BLOCK)

    @property
    def num_slots(self) -> int:
        """Places: no more than the pieces of a part, and of the one before it, which may still be on their way up."""
        return min(NUM_SLOTS, 2 * -(-self.numel // self.piece_numel)) if self.steps else 0

    @property
    def num_bytes(self) -> int:
        """Of everything."""
        places = self.num_slots * (1 + self.fetches_grads)
        accumulated = aligned_bytes(self.numel, torch.float32) if self.accumulates else 0
        return places * aligned_bytes(self.piece_numel, self.dtype) + accumulated


class StagingRing:
    """Places for pieces, and one for gradients that are added up."""

    def __init__(self, size: RingSize, device: torch.device, usage: TierUsage) -> None:
        """Page-locked where `device`, which copies to and from it, is a GPU."""
        is_cuda = device.type == "cuda"
        self._slab = HostSlab(size.num_bytes, pinned=is_cuda, usage=usage)
        self.piece_numel = size.piece_numel

        def take(numel: int, dtype: torch.dtype) -> torch.Tensor:
            # touch every page now: memory that is not there must fail before training
            return self._slab.take(numel, dtype).zero_()

        self.slots = [
            Slot(
                take(size.piece_numel, size.dtype),
                take(size.piece_numel, size.dtype) if size.fetches_grads else None,
                _event(is_cuda),
                _event(is_cuda),
            )
            for _ in range(size.num_slots)
        ]
        self._accumulated = take(size.numel, torch.float32) if size.accumulates else None
        self._next = 0

    def take(self) -> Slot:
        """The place whose turn it is."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        return slot

    def grads_host(self, numel: int) -> torch.Tensor:
        """Place for `numel` gradient elements, float32. The caller must be done with what it put here before."""
        assert self._accumulated is not None, "this ring was made without room for gradients"
        return self._accumulated[:numel]

    def close(self) -> None:
        """Unlocks the pages."""
        self._slab.close()


def _event(is_cuda: bool) -> torch.cuda.Event | None:
    if not is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()  # before it has a handle, which the compiled kernel wants
    return event
