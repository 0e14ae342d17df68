"""Page-locked staging between the tiers, bounded whatever the size of the model.

`param_host` slots: updated shards leave the host from here. `grad_host`: where the synchronous step and
gradient accumulation bring reduced gradients down, one host part at a time. (Overlapped schedules keep all gradients
of a step instead: `heavylift.offload.overlap`.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes


@dataclass(eq=False)
class Slot:
    """One place of the ring."""

    param_host: torch.Tensor
    """Updated shard of a host part, flat, in the dtype of the parameters."""
    free_event: torch.cuda.Event | None = None
    """Recorded behind the copy that last read `param_host`; the slot is filled again only after it."""

    def wait_until_free(self) -> None:
        """Blocks until the copy out of this slot is done."""
        if self.free_event is not None:
            self.free_event.synchronize()
            self.free_event = None


class StagingRing:
    """Slots, the one that was given back first is handed out first, and one place for gradients."""

    def __init__(self, slots: Sequence[Slot], grad_host: torch.Tensor | None, slab: HostSlab) -> None:
        self._free = deque(slots)
        self._grad_host = grad_host
        self._slab = slab

    @staticmethod
    def num_bytes(num_slots: int, numel: int, dtype: torch.dtype, grad_dtype: torch.dtype | None) -> int:
        """Bytes of a ring for host parts of at most `numel` elements."""
        grad_bytes = 0 if grad_dtype is None else aligned_bytes(numel, grad_dtype)
        return num_slots * aligned_bytes(numel, dtype) + grad_bytes

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        numel: int,
        dtype: torch.dtype,
        grad_dtype: torch.dtype | None,
        *,
        pinned: bool,
        usage: TierUsage,
    ) -> StagingRing:
        """A ring for host parts of at most `numel` elements; `pinned` where a GPU copies to and from it.

        `grad_dtype`: in what dtype gradients come down through here; None where they do not.
        """
        slab = HostSlab(cls.num_bytes(num_slots, numel, dtype, grad_dtype), pinned=pinned, usage=usage)
        slots = [Slot(slab.take(numel, dtype)) for _ in range(num_slots)]
        grad_host = None if grad_dtype is None else slab.take(numel, grad_dtype)
        for tensor in (*(slot.param_host for slot in slots), *(() if grad_host is None else (grad_host,))):
            tensor.zero_()
        return cls(slots, grad_host, slab)

    def grads_host(self, numel: int) -> torch.Tensor:
        """Place for `numel` gradient elements. The caller must be done with what it put here before."""
        assert self._grad_host is not None, "this ring was made without room for gradients"
        return self._grad_host[:numel]

    @property
    def has_slot(self) -> bool:
        """Whether there is one to take."""
        return bool(self._free)

    def take_slot(self) -> Slot:
        """A slot to be written behind its `free_event`. Give it back."""
        assert self._free, "all slots have been taken"
        return self._free.popleft()

    def give_back(self, slot: Slot) -> None:
        """All copies out of it have been issued, and `free_event` is behind them."""
        self._free.append(slot)

    def close(self) -> None:
        """Unlocks the pages."""
        self._slab.close()
