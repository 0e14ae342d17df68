"""What comes down from the device when the CPU is about to step a part: gradients that wait there, and the parameters,
which are half of split masters.

`begin` issues the copy into one of two page-locked slots, `take` waits for it. The worker begins the next task's copies
before it steps the group at hand, so that the bus works beside the CPU. (Other gradients are copied as they come, into
memory of their own: `heavylift.offload.overlap`.) Only the worker's thread calls these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heavylift.config.schema import StateFormat
from heavylift.offload.staging import Slot
from heavylift.offload.states import Part
from heavylift.offload.stepping import PartStepper, SegmentStep, Streams, on_stream, record

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

    def __init__(self, slots: GradientSlots, grads_device: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        """`grads_device`: flat, held until the copy is done, and there behind `ready`."""
        self._slots = slots
        self._ready = ready
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
        stream = self._slots.streams.fetch
        with on_stream(stream):
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            self._slot[: self._source.numel()].copy_(self._source, non_blocking=True)
        self._event = record(stream)

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


class ParamFetch:
    """The parameters of one part of split states on their way to a staging slot, for its step or its revision.

    `begin` takes the slot in any case: a task that took it later could find it held by the task after it. The copy is
    issued ahead for a step, whose parameters stay as they are until then, and in `take` for a revision, whose
    parameters the step before it may still be changing.
    """

    def __init__(
        self,
        stepper: PartStepper,
        part: Part,
        steps: Sequence[SegmentStep],
        ready: torch.cuda.Event | None,
        *,
        ahead: bool,
    ) -> None:
        """`ready`: behind the part's gradient, and so behind the forward that read its last step's parameters."""
        assert part.state_format is StateFormat.SPLIT, f"the masters of {part.group.name} are {part.state_format}"
        assert stepper.ring is not None
        self._stepper, self._ring, self._part, self._steps = stepper, stepper.ring, part, steps
        self._ready, self._ahead = ready, ahead
        self._slot: Slot | None = None
        self._event: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Takes a slot, once, if there is a free one."""
        if self._slot is None and self._ring.has_slot:
            self._slot = self._ring.take_slot()
            if self._ahead:
                self._copy(self._slot)

    def _copy(self, slot: Slot) -> None:
        stream = self._stepper.streams.fetch
        for event in (slot.free_event, self._ready):
            if stream is not None and event is not None:
                stream.wait_event(event)
        slot.free_event = None
        self._event = self._stepper.params_to_slot(self._part, self._steps, slot)

    def take(self) -> Slot:
        """The slot with the parameters in it, which is the caller's now; blocks until they are there."""
        self.begin()
        # of two slots at most one is held by a task that was prepared and then put back in the order
        assert self._slot is not None, f"no slot is free for {self._part.group.name}"
        slot, self._slot = self._slot, None
        if not self._ahead:
            self._copy(slot)
        if self._event is not None:
            self._event.synchronize()
        return slot

    def release(self) -> None:
        """Nobody wants them: the slot is free behind the copy down."""
        if self._slot is not None:
            self._slot.free_event = self._event or self._slot.free_event
            self._ring.give_back(self._slot)
            self._slot = None


class Incoming:
    """What a task of the worker takes from the device: begun ahead, together."""

    def __init__(self, grads: torch.Tensor | GradientFetch, params: ParamFetch | None = None) -> None:
        """`grads`: flat, of the part, where they lie, or on their way."""
        self.grads = grads
        self.params = params

    def begin(self) -> None:
        """Issues the copies for which there is room."""
        if isinstance(self.grads, GradientFetch):
            self.grads.begin()
        if self.params is not None:
            self.params.begin()

    def take(self) -> tuple[torch.Tensor, Slot | None]:
        """The gradient on the host and the slot with the parameters; blocks until they are there."""
        grads_host = self.grads.take() if isinstance(self.grads, GradientFetch) else self.grads
        return grads_host, None if self.params is None else self.params.take()

    def release(self) -> None:
        """Nobody reads them any more: their slots, if they have any, are free."""
        if isinstance(self.grads, GradientFetch):
            self.grads.release()
        if self.params is not None:
            self.params.release()
