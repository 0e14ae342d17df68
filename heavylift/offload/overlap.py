"""Overlapped schedules: the step of the host tier runs on a worker thread, beside backward or beside the next forward.

    hook (backward, reduce stream)   gradient D2H into the kept gradients, norm part on the device, `param.grad` freed
    speculative: at once             worker: CPU step as if no clipping were needed, shard H2D, gate opens; of the
                                     gradients that have arrived, the newest first
    step()                           norm -> coefficient c, or skip
        deferred                     worker: CPU steps with c in forward order, each opens its gate
        speculative, c = 1           what the worker has not done yet turns to forward order
        speculative, c < 1           worker: corrects every group from the kept gradient (forward order)
        speculative, skip            worker: takes every step back

A gradient that stays on the device (`TieredOptions.gradients_on`) and parameters that are half of `split` masters come
down piece by piece as the worker steps them (`heavylift.offload.staging`). What the worker does for a streamed part is
to issue it, from the gradient on the device (`heavylift.offload.streamed`); a second thread does, so that bus and CPU
work side by side.

`deferred` equals the synchronous step bit for bit. `speculative` does where clipping does not strike; where it does,
see `heavylift.offload.correction` for how close it comes. The device tier is stepped in step(), exactly, always.

The main thread never waits for the worker here: it waits at the gates, in the next forward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from heavylift.config.schema import Tier
from heavylift.offload.device_steps import DeviceSteps
from heavylift.offload.groups import Group, Segment
from heavylift.offload.hooks import listen_to_gradients
from heavylift.offload.options import TieredOptions
from heavylift.offload.pieces import Operation
from heavylift.offload.states import Part
from heavylift.offload.stepping import PartStepper, SegmentStep, scaled
from heavylift.offload.streamed import StreamedSteps
from heavylift.offload.streams import on_stream, record
from heavylift.offload.thread_names import BUS_THREAD
from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes
from heavylift.offload.timeline import Activity
from heavylift.offload.worker import Worker

MIN_COEFFICIENT = 2.0**-7
"""A group whose own norm already asks for a smaller clipping coefficient than this is not stepped speculatively."""


MAX_COPYING = 4
"""Gradients on the device that wait for their copy to the host at one time. The program runs ahead of the device, and
would otherwise be many layers, and their gradients, ahead; so far ahead the device has enough to do while it waits."""


@dataclass
class _GroupState:
    """What is known of a group's gradient in the step at hand."""

    arrived: list[Segment] = field(default_factory=list)
    ready: bool = False
    """All gradients that will come are there, and have been taken."""
    steps: tuple[SegmentStep, ...] = ()
    """Set when the group is stepped: in backward or at the step."""
    grads_device: torch.Tensor | None = None
    """Flat gradient on the device, kept for a device part, and for a host part whose gradient is not copied at once."""
    d2h_event: torch.cuda.Event | None = None
    """Behind the gradient's way to the host, or that of its sum of squares alone."""


def _is_past(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()


def kept_gradient_bytes(by_cpu: Sequence[int], dtype: torch.dtype, num_groups: int, gradients_on: Tier) -> int:
    """Page-locked bytes for gradients kept on the host, and a sum of squares for each group. `by_cpu`: elements of the
    host parts that the CPU steps."""
    kept = by_cpu if gradients_on is Tier.HOST else ()
    return sum(aligned_bytes(numel, dtype) for numel in kept) + aligned_bytes(num_groups, torch.float64)


class OverlappedSteps:
    """Collects gradients in backward and has them stepped by the worker."""

    def __init__(
        self,
        groups: Sequence[Group],
        parts: Sequence[Sequence[Part]],
        stepper: PartStepper,
        segment_step: Callable[[Segment], SegmentStep],
        begin_step: Callable[[], None],
        usage: TierUsage,
        options: TieredOptions,
        streamed: StreamedSteps | None = None,
    ) -> None:
        """`segment_step`: a segment with the hyperparameters as they are now; `begin_step` runs before anything else of
        a step. `options.keeps_gradients` is false with gradient accumulation: then nothing is collected here."""
        self._groups = tuple(groups)
        self._parts = dict(zip(groups, parts, strict=True))
        self._host_part = {g: next((p for p in ps if p.tier is Tier.HOST), None) for g, ps in self._parts.items()}
        self._stepper = stepper
        self._streamed = streamed
        self._segment_step = segment_step
        self._begin_step = begin_step
        self._max_grad_norm = options.max_grad_norm
        self._schedule = options.schedule
        device = self._groups[0].device
        self.worker = Worker(device, stepper.timeline)
        self._bus_worker = None if streamed is None else Worker(device, stepper.timeline, BUS_THREAD)
        self._in_step = False
        self._speculating = False
        self.speculate_next = False
        """Whether the next backward steps at once; chosen by the schedule before it begins."""
        self._state: dict[Group, _GroupState] = {group: _GroupState() for group in self._groups}
        self._unstepped: set[Part] = set()
        self._on_device = DeviceSteps(stepper.device)
        self._in_flight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self.sums = torch.zeros(len(self._groups), dtype=torch.float64, device=device)
        """Sum of squares of each group's gradient."""
        self._kept: dict[Part, torch.Tensor] = {}
        """Gradients on the host, of parts whose gradients are copied as they come."""
        self._slab: HostSlab | None = None
        self._hooks: list[RemovableHandle] = []
        if not options.keeps_gradients:
            return
        self._allocate_kept(device, usage, options.gradients_on)
        self._hooks += listen_to_gradients(self._groups, self)

    def _allocate_kept(self, device: torch.device, usage: TierUsage, gradients_on: Tier) -> None:
        host_parts = [part for part in self._host_part.values() if part is not None and not part.streamed]
        numels, dtype = [part.numel for part in host_parts], self._groups[0].dtype
        num_bytes = kept_gradient_bytes(numels, dtype, len(self._groups), gradients_on)
        self._slab = HostSlab(num_bytes, pinned=device.type == "cuda", usage=usage)
        self._sums_host = self._slab.take(len(self._groups), torch.float64)
        if gradients_on is Tier.HOST:
            self._kept = {part: self._slab.take(part.numel, dtype) for part in host_parts}
        for place in self._kept.values():
            place.zero_()  # touch every page now: memory that is not there must fail before training

    def _worker_of(self, part: Part) -> Worker:
        """Tasks of one part are all done by the same thread, in order."""
        return self._bus_worker if part.streamed and self._bus_worker is not None else self.worker

    @property
    def threads(self) -> dict[int, str]:
        """The operating system's ids of the threads that step the host tier, with what each does."""
        found = {self.worker.thread_id: "optimizer worker"}
        if self._bus_worker is not None:
            found[self._bus_worker.thread_id] = "streamed steps"
        return {thread: name for thread, name in found.items() if thread is not None}

    def drain(self) -> None:
        """Waits until nothing is left to do, or to issue. Raises what a task raised."""
        self.worker.drain()
        if self._bus_worker is not None:
            self._bus_worker.drain()

    # ---- in backward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_grad(self, group_index: int, segment_index: int) -> None:
        """Runs in the stream that reduced the gradient. A group is ready when its last parameter has one."""
        group = self._groups[group_index]
        segment = group.segments[segment_index]
        self._begin_once()
        state = self._state[group]
        if segment in state.arrived:
            raise RuntimeError(
                f"{segment.name} got a second gradient before step(): several backward passes per step need "
                "TieredOptions(accumulate=True)"
            )
        state.arrived.append(segment)
        if len(state.arrived) == len(group.segments):
            self._group_ready(group_index, group)

    def _begin_once(self) -> None:
        """At the first gradient of a step, or in step() where there is none."""
        if self._in_step:
            return
        self._begin_step()
        self._in_step = True
        self._speculating = self.speculate_next
        # not earlier: until the worker was idle, a copy of them could still be under way
        self.sums.zero_()

    def _group_ready(self, index: int, group: Group) -> None:
        state, streams = self._state[group], self._stepper.streams
        state.ready = True
        if self._speculating:
            self._begin_group(group)
        flat = group.grads()
        self.sums[index] = self._stepper.device.sum_squares(flat)
        for segment in state.arrived:
            segment.param.grad = None
        host_part = self._host_part[group]
        if host_part is None or host_part.start > 0 or host_part not in self._kept:
            state.grads_device = flat
        if host_part is None:
            return
        streams.d2h_after_current()
        with on_stream(streams.d2h):
            if host_part in self._kept:
                self._kept[host_part].copy_(flat[host_part.start : host_part.stop], non_blocking=True)
            self._sums_host[index].copy_(self.sums[index], non_blocking=True)
        state.d2h_event = record(streams.d2h)
        if host_part in self._kept:
            # also where a device part keeps it: that may be stepped and gone before the copy is done
            self._hold_until_copied(state.d2h_event, flat)
        if self._speculating:
            grads = self._grads_of(host_part, state)
            task = partial(self._speculate, index, host_part, state.steps, grads, state.d2h_event)
            self._worker_of(host_part).submit(index, group.gate, task, partial(_is_past, state.d2h_event))

    def _grads_of(self, part: Part, state: _GroupState) -> torch.Tensor:
        """Flat gradient of a host part: kept on the host, or on the device until it is stepped."""
        if part in self._kept:
            return self._kept[part]
        assert state.grads_device is not None
        return state.grads_device[part.start : part.stop]

    def _begin_group(self, group: Group) -> None:
        """Counts the step of the segments with a gradient and takes the hyperparameters as they are now."""
        state = self._state[group]
        arrived = set(state.arrived)
        for segment in state.arrived:
            segment.num_steps += 1
        state.steps = tuple(self._segment_step(segment) for segment in group.segments if segment in arrived)

    def _hold_until_copied(self, event: torch.cuda.Event | None, flat: torch.Tensor) -> None:
        """Keeps the reduced gradient, which belongs to the reduce stream's pool, until the copy out of it is done."""
        if event is None:
            return
        self._let_go_of_copied()
        while len(self._in_flight) >= MAX_COPYING:
            self._in_flight.popleft()[0].synchronize()
        self._in_flight.append((event, flat))

    def _let_go_of_copied(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()

    def refuse_mid_step(self, what: str) -> None:
        """Raises RuntimeError where backward has taken the step already, and step() may yet revise it."""
        if self._in_step and self._speculating:
            raise RuntimeError(
                f"cannot {what} between backward and step(): the schedule {self._schedule} has taken the step during "
                "backward; do it before backward or after step(), or take schedule deferred or synchronous"
            )

    def flush(self) -> None:
        """After backward: groups of which a parameter got no gradient are as ready as they will be.

        Raises RuntimeError where a step taken in backward had other hyperparameters than it should have by now; with
        the old ones back, the step can be finished.
        """
        self._begin_once()
        if self._speculating:
            self._check_unchanged()  # before more groups take the new ones
        for index, group in enumerate(self._groups):
            state = self._state[group]
            if state.arrived and not state.ready:
                self._group_ready(index, group)

    def prepare(self) -> None:
        """Before the norm is waited for: what of the device parts' steps does not depend on it. The device is still
        busy with backward, and would later wait for Python."""
        self._on_device = DeviceSteps(self._stepper.device)
        for group in self._groups:
            state = self._state[group]
            if not self._speculating:
                self._begin_group(group)
            for part in self._parts[group]:
                if part.tier is Tier.DEVICE and state.steps:
                    self._on_device.add(part, state.steps, state.grads_device)
        self._on_device.prepare()

    # ---- at the step ----------------------------------------------------------------------------------------------

    @property
    def speculated(self) -> bool:
        """Whether the last step was taken during backward."""
        return self._speculating

    def finish(self, coefficient: float, skip: bool) -> None:
        """The norm is known, after `prepare`: device parts are stepped here, host parts by the worker, in forward
        order.
        """
        if not self._speculating:
            self._stepper.streams.step_after_current()  # parameters that come down may have been written meanwhile
        self._finish(coefficient, skip)

    def discard(self) -> bool:
        """Forgets the gradients of the step at hand, of which step() will know nothing; false where there are none. A
        step that backward has taken from them is taken back, as one whose norm is not finite is."""
        if not self._in_step:
            return False
        for group in self._groups:
            for segment in self._state[group].arrived:
                segment.param.grad = None  # still there where the group has not got all of its gradients
        self._finish(1.0, skip=True)
        return True

    def _finish(self, coefficient: float, skip: bool) -> None:
        for place, group in enumerate(self._groups):
            state, part = self._state[group], self._host_part[group]
            if skip:
                for step in state.steps:
                    step.segment.num_steps -= 1
            if part is not None and state.steps:
                self._finish_host_part(place, part, state, coefficient, skip)
        self.worker.turn_to_forward_order()
        if self._bus_worker is not None:
            self._bus_worker.turn_to_forward_order()
        if not skip:
            self._on_device.run(coefficient)
        self._on_device = DeviceSteps(self._stepper.device)  # the old one holds gradients
        # the norm has been waited for, so nearly all are copied: the next forward's activations need their room
        self._let_go_of_copied()
        self._in_step = False
        for group in self._groups:
            self._state[group] = _GroupState()

    def _check_unchanged(self) -> None:
        for state in self._state.values():
            for step in state.steps:
                now = self._segment_step(step.segment)
                if now != step:
                    raise RuntimeError(
                        f"{step.segment.name}: its step was taken during backward with {step.hyper}, but at step() its "
                        f"parameter group asks for {now.hyper}: change hyperparameters before backward, or take "
                        "schedule deferred or synchronous"
                    )

    def _finish_host_part(self, place: int, part: Part, state: _GroupState, coefficient: float, skip: bool) -> None:
        grads = self._grads_of(part, state)
        if not self._speculating:
            if skip:
                return
            task = partial(self._step, part, scaled(state.steps, coefficient), grads, state.d2h_event)
        elif skip or coefficient != 1.0:
            operation = Operation.UNDO if skip else Operation.CORRECT
            task = partial(self._revise, part, state.steps, grads, operation, coefficient)
        else:
            return
        self._worker_of(part).submit(place, part.group.gate, task)

    # ---- on the worker --------------------------------------------------------------------------------------------

    def _step(
        self, part: Part, steps: Sequence[SegmentStep], grads: torch.Tensor, d2h_event: torch.cuda.Event | None
    ) -> None:
        self._wait_for_gradient(part, d2h_event)
        self._run_host(part, steps, grads, Operation.STEP, 1.0)

    def _wait_for_gradient(self, part: Part, d2h_event: torch.cuda.Event | None) -> None:
        if d2h_event is not None:
            with self._stepper.timeline.measure(Activity.GRADIENT, part.group.name):
                d2h_event.synchronize()

    def _speculate(
        self,
        index: int,
        part: Part,
        steps: Sequence[SegmentStep],
        grads: torch.Tensor,
        d2h_event: torch.cuda.Event | None,
    ) -> None:
        self._wait_for_gradient(part, d2h_event)
        if not self._may_speculate(float(self._sums_host[index])):
            self._unstepped.add(part)
            part.group.gate.open(None)
            return
        self._run_host(part, steps, grads, Operation.STEP, 1.0)

    def _revise(
        self,
        part: Part,
        steps: Sequence[SegmentStep],
        grads: torch.Tensor,
        operation: Operation,
        coefficient: float,
    ) -> None:
        if part not in self._unstepped:
            self._run_host(part, steps, grads, operation, coefficient)
            return
        self._unstepped.discard(part)
        if operation is Operation.CORRECT:
            self._run_host(part, scaled(steps, coefficient), grads, Operation.STEP, 1.0)
        else:
            part.group.gate.open(None)

    def _may_speculate(self, sum_squares: float) -> bool:
        """False for a gradient that will be skipped or clipped hard: a correction is as good as the moments are still
        readable behind it. Its step waits for the norm."""
        if not math.isfinite(sum_squares):
            return False
        return self._max_grad_norm == 0 or math.sqrt(sum_squares) * MIN_COEFFICIENT < self._max_grad_norm

    def _run_host(
        self,
        part: Part,
        steps: Sequence[SegmentStep],
        grads: torch.Tensor | None,
        operation: Operation,
        coefficient: float,
    ) -> None:
        """`grads`: the part's gradient, of a streamed one on the device; None: its accumulator."""
        if part.streamed:
            assert self._streamed is not None
            self._streamed.run(part, steps, grads, operation, coefficient)
            return
        grads = part.accumulator if grads is None else grads
        assert grads is not None
        self._stepper.step_host_part(part, steps, grads, operation, coefficient)

    # ---- with gradient accumulation -------------------------------------------------------------------------------

    def finish_accumulated(self, steps_of: dict[Group, list[SegmentStep]]) -> None:
        """Deferred steps from the accumulators, which are zero afterwards; the hyperparameters hold the coefficient."""
        self._stepper.streams.step_after_current()  # parameters that come down may have been written meanwhile
        on_device, accumulators = DeviceSteps(self._stepper.device), []
        for place, group in enumerate(self._groups):
            for part in self._parts[group]:
                assert part.accumulator is not None
                if part.tier is Tier.DEVICE:
                    on_device.add(part, steps_of[group])
                    accumulators.append(part.accumulator)
                elif steps_of[group]:
                    task = partial(self._run_host, part, steps_of[group], None, Operation.STEP, 1.0)
                    self._worker_of(part).submit(place, group.gate, task)
        on_device.run()
        for accumulator in accumulators:
            accumulator.zero_()

    def close(self) -> None:
        """Lets go of the parameters, ends the worker after its tasks and unlocks the pages."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.worker.close()
        if self._bus_worker is not None:
            self._bus_worker.close()
        self._stepper.streams.synchronize()
        if self._slab is not None:
            self._slab.close()
