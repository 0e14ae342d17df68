"""Gradients of micro-batches added up on the host without holding up backward.

    training thread (reduce stream)   copy into a slot of page-locked memory on the D2H stream; event; on with backward
    worker thread                     waits for the event, adds the slot to the accumulators, the slot is free again

Slots are handed out in turn, and the training thread waits only where the next one is still being added. The worker
takes its tasks in the order in which they came, so every element is added in the order of the micro-batches, and a step
handed over later finds the sums whole: the bits are those of adding at once.

Gradients go through slots in pieces: several small ones share a slot, a large one takes several slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from heavylift.offload.gates import Gate
from heavylift.offload.stepping import PartStepper
from heavylift.offload.streams import on_stream, record
from heavylift.offload.timeline import Activity
from heavylift.offload.worker import Worker

NUM_SLOTS = 8
"""Into so many the staging memory is divided: the more, the earlier the worker can begin with a large gradient."""


@dataclass(frozen=True)
class _Piece:
    """`target` += `staged`."""

    target: torch.Tensor
    staged: torch.Tensor
    home_event: torch.cuda.Event | None
    """Behind the copy home of zeros into a streamed part's `target`, if one has been under way."""


@dataclass(eq=False)
class _Slot:
    staging: torch.Tensor
    """float32, flat."""
    gate: Gate = field(default_factory=Gate)
    """Closed until the worker has added what is in the slot; carries the worker's error to the training thread."""
    pieces: list[_Piece] = field(default_factory=list)
    """What has been copied here and not been handed to the worker."""
    num_used: int = 0
    sources: list[torch.Tensor] = field(default_factory=list)
    """Their gradients, which the copies may still be reading."""


class HostAdditions:
    """A ring of slots between backward and the worker that adds."""

    def __init__(self, worker: Worker, stepper: PartStepper, staging: torch.Tensor, num_slots: int = NUM_SLOTS) -> None:
        """`staging`: flat float32 host memory, page-locked where gradients come from a GPU; divided into slots."""
        assert staging.numel() > 0 and staging.dtype == torch.float32, f"{staging.shape=} {staging.dtype=}"
        self._worker = worker
        self._stepper = stepper
        self._slots = [_Slot(part) for part in staging.split(-(-staging.numel() // num_slots))]
        self._next = 0
        self._copying: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        """Gradients on the device that are being copied."""

    def add(
        self,
        place: int,
        label: str,
        target: torch.Tensor,
        grad: torch.Tensor,
        home_event: torch.cuda.Event | None = None,
    ) -> None:
        """`target` += `grad`, by the worker, after all that was added before. Both flat and equally long.

        `grad` lies where the current stream has put it; it may be let go of at once. `place` and `label`: of its group.
        `home_event`: of its part; what is behind it comes first.
        Raises RuntimeError when an earlier addition or step failed.
        """
        assert target.numel() == grad.numel(), f"{target.shape=} {grad.shape=}"
        done = 0
        while done < grad.numel():
            slot = self._open_slot(label)
            room = min(slot.staging.numel() - slot.num_used, grad.numel() - done)
            staged = slot.staging[slot.num_used : slot.num_used + room]
            self._copy(staged, grad[done : done + room])
            slot.sources.append(grad)
            slot.pieces.append(_Piece(target[done : done + room], staged, home_event))
            slot.num_used += room
            done += room
            if slot.num_used == slot.staging.numel():
                self.hand_over(place, label)

    def _open_slot(self, label: str) -> _Slot:
        """The slot that is being filled; an empty one is waited for."""
        slot = self._slots[self._next]
        if not slot.pieces:
            self._wait(slot, Activity.SLOT, label)
        return slot

    def _wait(self, slot: _Slot, activity: Activity, label: str) -> None:
        """Until the worker is done with the slot; reported only where there was something to wait for."""
        start_s, waited_s = time.perf_counter(), slot.gate.waited_s
        slot.gate.wait()
        if slot.gate.waited_s > waited_s:
            self._stepper.timeline.add(activity, label, start_s)

    def _copy(self, staged: torch.Tensor, grad: torch.Tensor) -> None:
        streams = self._stepper.streams
        streams.d2h_after_current()
        with on_stream(streams.d2h):
            staged.copy_(grad, non_blocking=True)

    def hand_over(self, place: int, label: str) -> None:
        """Gives what has been copied so far to the worker; at the end of a group, so that it need not wait for more."""
        slot = self._slots[self._next]
        if not slot.pieces:
            return
        event = record(self._stepper.streams.d2h)
        self._let_go()
        if event is not None:
            # the reduce stream's memory: it must not be given out again while the copy reads it
            self._copying.append((event, slot.sources))
        self._worker.submit(place, slot.gate, partial(_add_up, self._stepper, slot.gate, slot.pieces, event, label))
        slot.pieces, slot.sources, slot.num_used = [], [], 0
        self._next = (self._next + 1) % len(self._slots)

    def _let_go(self) -> None:
        """Of gradients whose copies are done."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()

    def settle(self) -> None:
        """Waits until everything is added. Raises RuntimeError when something failed."""
        self.hand_over(0, "")
        for slot in self._slots:
            self._wait(slot, Activity.DRAIN, "")
        self._copying.clear()  # the worker has waited for these copies


def _add_up(
    stepper: PartStepper, gate: Gate, pieces: Sequence[_Piece], event: torch.cuda.Event | None, label: str
) -> None:
    """On the worker."""
    if event is not None:
        with stepper.timeline.measure(Activity.GRADIENT, label):
            event.synchronize()
    with stepper.timeline.measure(Activity.ACCUMULATE, label):
        for piece in pieces:
            if piece.home_event is not None:
                piece.home_event.synchronize()
            stepper.host.accumulate(piece.target, piece.staged)
    gate.open(None)
