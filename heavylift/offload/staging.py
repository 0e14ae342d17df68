"""Page-locked staging between the tiers: a bounded ring of slots, each as large as the largest host part.

A slot carries one group through its step: reduced gradients come down into `grad_host`, the updated shard leaves from
`param_host`. The ring bounds page-locked memory whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes


@dataclass(eq=False)
class Slot:
    """One place of the ring."""

    grad_host: torch.Tensor
    """Gradients of one host part, flat, in the dtype in which they cross the bus."""
    param_host: torch.Tensor
    """Updated shard of that part, flat, in the dtype of the parameters."""
    free_event: torch.cuda.Event | None = None
    """Recorded behind the copy that last read `param_host`; the slot is filled again only after it."""

    def wait_until_free(self) -> None:
        """Blocks until the copy out of this slot is done."""
        if self.free_event is not None:
            self.free_event.synchronize()
            self.free_event = None


class StagingRing:
    """Slots handed out in turn."""

    def __init__(self, slots: Sequence[Slot], slab: HostSlab) -> None:
        self._slots = slots
        self._slab = slab
        self._next = 0

    @staticmethod
    def slot_bytes(numel: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> int:
        """Bytes of one slot for host parts of at most `numel` elements."""
        return aligned_bytes(numel, grad_dtype) + aligned_bytes(numel, dtype)

    @classmethod
    def allocate(
        cls, num_slots: int, numel: int, dtype: torch.dtype, grad_dtype: torch.dtype, *, pinned: bool, usage: TierUsage
    ) -> StagingRing:
        """A ring of `num_slots` slots; `pinned` where a GPU copies to and from it."""
        slab = HostSlab(num_slots * cls.slot_bytes(numel, dtype, grad_dtype), pinned=pinned, usage=usage)
        slots = [Slot(slab.take(numel, grad_dtype), slab.take(numel, dtype)) for _ in range(num_slots)]
        for slot in slots:
            slot.grad_host.zero_()
            slot.param_host.zero_()
        return cls(slots, slab)

    def next_slot(self) -> Slot:
        """The next slot in turn, free to be written."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait_until_free()
        return slot

    def close(self) -> None:
        """Unlocks the pages."""
        self._slab.close()
