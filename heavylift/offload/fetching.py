"""Gradients that wait on the device and come to the host when the CPU steps them.

`begin` issues the copy into one of two page-locked slots, `take` waits for it. The worker begins the next task's copy
before it steps the group at hand, so that the bus works beside the CPU. (Otherwise all gradients of a step are copied
as they come, into memory of their own: `heavylift.offload.overlap`.) Only the worker's thread calls these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heavylift.offload.stepping import Streams, on_stream, record

NUM_SLOTS = 2


class GradientSlots:
    """Host memory that gradients pass through, one in each slot."""

    def __init__(self, slots: Sequence[torch.Tensor], streams: Streams) -> None:
        """`slots`: flat, each as large as the largest host part; page-locked where the device is a GPU."""
        self.streams = streams
        self._free = list(slots)

    def take(self) -> torch.Tensor | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: torch.Tensor) -> None:
        """Nobody reads it any more."""
        self._free.append(slot)


class GradientFetch:
    """One part's gradient on its way."""

    def __init__(self, slots: GradientSlots, grads_device: torch.Tensor) -> None:
        """`grads_device`: flat, held until the copy is done; what wrote it comes before this on the D2H stream."""
        self._slots = slots
        self._source: torch.Tensor | None = grads_device
        self._slot: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Issues the copy, once, if there is a free slot."""
        if self._slot is not None or self._source is None:
            return
        self._slot = self._slots.take()
        if self._slot is None:
            return
        with on_stream(self._slots.streams.d2h):
            self._slot[: self._source.numel()].copy_(self._source, non_blocking=True)
        self._event = record(self._slots.streams.d2h)

    def take(self) -> torch.Tensor:
        """The gradient on the host, flat; blocks until it is there. Valid until `release`."""
        self.begin()
        # of two slots at most one is held by a task that was prepared and then put back in the order
        assert self._slot is not None and self._source is not None, "no slot is free for the group at hand"
        if self._event is not None:
            self._event.synchronize()
        numel, self._source = self._source.numel(), None
        return self._slot[:numel]

    def release(self) -> None:
        """The slot may be filled again."""
        if self._slot is not None:
            self._slots.give_back(self._slot)
        self._slot = self._source = None
