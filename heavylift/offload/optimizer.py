"""TieredAdamW: AdamW whose states live on the device and the host tier, as a `torch.optim.Optimizer`.

One step: norm of all gradients -> per group, in forward order, piece by piece: gradient D2H -> step on its tier ->
updated shard H2D; then the group's gate opens. The device parts step where they lie, all groups' at once.

`_step_now` is the synchronous step: it begins when backward has ended, and when it returns the current stream sees
every updated shard. It is the specification that the schedules of `heavylift.offload.overlap` must equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.device_steps import DeviceSteps
from heavylift.offload.formats import check_format
from heavylift.offload.gates import install_gate
from heavylift.offload.gradients import GradientAccumulation, accumulated_sums, global_norm, shard_process_groups
from heavylift.offload.groups import STEP_TAKEN, Group, Segment, num_shards, plain_groups
from heavylift.offload.kernels import device_kernel, host_kernel
from heavylift.offload.loss_scale_names import TellsLossScale
from heavylift.offload.options import TieredOptions
from heavylift.offload.overlap import OverlappedSteps
from heavylift.offload.param_groups import (
    can_be_taken_back,
    check_groups,
    check_hyperparameters,
    check_still_frozen,
    frozen_places,
)
from heavylift.offload.policy import SchedulePolicy
from heavylift.offload.staging import StagingRing
from heavylift.offload.state_dict import load_optimizer_state, optimizer_state_dict
from heavylift.offload.states import Part, allocate_parts
from heavylift.offload.stepping import PartStepper, SegmentStep, scaled
from heavylift.offload.streamed import StreamedSteps
from heavylift.offload.streams import Streams
from heavylift.offload.tiers import TierUsage, place
from heavylift.offload.timeline import ThreadSpan, Timeline


class TieredAdamW(TellsLossScale, torch.optim.Optimizer):
    """AdamW (decoupled weight decay) on tiers.

    `params` and the hyperparameters are as in `torch.optim.AdamW`: parameters or parameter groups with their own lr,
    betas, eps and weight_decay; LR schedulers work. Defaults are torch's but for weight_decay: 0 here, 0.01 there; it
    is decoupled, so 0 is plain Adam. `groups`: the gather groups of a sharded model, in forward
    order (see `heavylift.offload.groups.make_group`); without them plain parameters are grouped by dtype and device.
    Masters start from the parameters and follow them when somebody else writes them (loading weights; call
    `synchronize` before writing).

    Clipping belongs to the step (`options.max_grad_norm`): the coefficient multiplies the float32 gradient inside the
    kernel. A step whose norm is not finite is skipped: weights and states keep their bits (to a stated bound where
    the step had been taken speculatively).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        *,
        groups: Sequence[Group] | None = None,
        options: TieredOptions | None = None,
    ) -> None:
        self._laid_out = False
        self._closed = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        check_hyperparameters(self.param_groups)
        self.options = options or TieredOptions()
        self.usage = TierUsage()
        self.timeline = Timeline()
        """Where the steps' time went; see `take_device_gate_s` too."""
        self.policy = SchedulePolicy(self.options.schedule, self.options.max_grad_norm)
        self.grad_norm = 0.0
        """Global norm of the last step's gradients, before clipping, without the factor of `set_grad_scale`."""
        self.skipped = False
        """Whether the last step was skipped because that norm was not finite."""
        self.num_skipped_steps = 0
        self.on_zero_grad: Callable[[], None] | None = None
        """Called first in `zero_grad`: for who has gradients that have not come here yet."""
        self._grad_scale = 1.0
        trainable = [p for pg in self.param_groups for p in pg["params"] if p.requires_grad]
        self._frozen = frozen_places(self.param_groups)
        self.groups: tuple[Group, ...] = tuple(plain_groups(trainable) if groups is None else groups)
        self._param_group_of = self._index_param_groups()
        self._process_groups = shard_process_groups(self.groups)
        self._allocate()
        self._laid_out = True

    def _index_param_groups(self) -> dict[nn.Parameter, int]:
        index = {p: i for i, pg in enumerate(self.param_groups) for p in pg["params"] if p.requires_grad}
        check_groups(self.groups, index, self.options)
        return index

    def _allocate(self) -> None:
        options = self.options
        device = self.groups[0].device if self.groups else torch.device("cpu")
        host, on_device = host_kernel(options.native, options.num_threads, options.cpu_ids), device_kernel(device)
        check_format(options.state_format, {group.dtype for group in self.groups})
        device_numels = place([g.numel for g in self.groups], options.ratio, options.tier)
        self.parts, self._slabs = allocate_parts(
            self.groups, device_numels, options.accumulate, self.usage, options.state_format, options.streamed_share
        )
        streamed = [part for parts in self.parts for part in parts if part.streamed]
        self._streamed = StreamedSteps(on_device, device, streamed, self.usage, self.timeline) if streamed else None
        self._stepper = PartStepper(host, on_device, self._allocate_ring(device), Streams(device), self.timeline)
        for group in self.groups:
            group.gate.observe(self.timeline, group.name)
            if group.module is not None:
                install_gate(group.module, group.gate, num_shards(group.segments[0].param))
        self._accumulation = (
            GradientAccumulation(self.groups, self.parts, self._stepper) if options.accumulate else None
        )
        self._overlap = (
            OverlappedSteps(
                self.groups,
                self.parts,
                self._stepper,
                self._segment_step,
                self._begin_step,
                self.usage,
                options,
                self._streamed,
            )
            if options.overlapped and self.groups
            else None
        )
        if self._overlap is not None:
            self._overlap.speculate_next = self._speculates()
            if self._accumulation is not None:
                self._accumulation.add_on(self._overlap.worker)
        self.follow_parameters()

    def _allocate_ring(self, device: torch.device) -> StagingRing | None:
        host_parts = [part for parts in self.parts for part in parts if part.tier is Tier.HOST]
        if not host_parts:
            return None
        dtypes = {group.dtype for group in self.groups}
        assert len(dtypes) == 1, f"one ring serves groups of one dtype, got {dtypes}"
        by_cpu, streamed = ([p.numel for p in host_parts if p.streamed is kind] for kind in (False, True))
        size = self.options.ring_size(by_cpu, streamed, dtypes.pop())
        return None if size is None else StagingRing(size, device, self.usage)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at construction only: the states are laid out once."""
        if self._laid_out:
            raise RuntimeError("TieredAdamW lays out its states once; give all parameter groups at construction")
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("TieredAdamW cannot be copied: threads step its memory; copy or load its state_dict() instead")

    # ---- one step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Norm, then every group by the schedule. Returns the closure's loss, if any.

        Raises UserError for hyperparameters that AdamW cannot step with, and for a parameter that was frozen when it
        was made and is not any more; RuntimeError after `close`, when the step before failed on the worker, and when
        hyperparameters changed after a backward that had taken the step already.
        """
        if self._closed:
            raise RuntimeError("this optimizer is closed")
        check_hyperparameters(self.param_groups)
        check_still_frozen(self._frozen)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overlap is None:
            self._step_now()
        elif self._accumulation is not None:
            self._step_accumulated(self._overlap, self._accumulation)
        else:
            self._step_overlapped(self._overlap)
        self.num_skipped_steps += self.skipped
        self._wait_for_plain_groups()
        return loss

    def _wait_for_plain_groups(self) -> None:
        """Nothing in the next forward would."""
        for group in self.groups:
            if group.module is None:
                group.gate.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients since the last step, wherever they wait by now; costs nothing right after a step.

        A step that backward has taken from them already is taken back by the worker, exact but for rounding
        (`heavylift.offload.correction`). Raises RuntimeError when an addition on the worker failed.
        """
        if self.on_zero_grad is not None:
            self.on_zero_grad()
        if self._accumulation is not None and self._accumulation.with_grad:
            self._accumulation.settle()
            self.synchronize()  # a group that got none may still be stepped from its accumulator
            self._accumulation.reset()
        if self._overlap is not None and not self._closed and self._overlap.discard():
            self._wait_for_plain_groups()
        super().zero_grad(set_to_none)

    def _step_now(self) -> None:
        """The synchronous step: the specification."""
        self._begin_step()
        if self._accumulation is not None:
            active = set(self._accumulation.with_grad)
            sums = accumulated_sums(self.parts, self._stepper)
        else:
            active = {s for group in self.groups for s in group.segments if s.param.grad is not None}
            sums = self._gradient_sums()
        # before the norm is waited for: the device is still busy with backward, and would later wait for Python
        steps_of = {group: [self._begin_segment(s) for s in group.segments if s in active] for group in self.groups}
        on_device = DeviceSteps(self._stepper.device)
        for part in (p for parts in self.parts for p in parts if p.tier is Tier.DEVICE):
            on_device.add(part, steps_of[part.group])
        on_device.prepare()
        coefficient = self._take_norm(sums)
        if self.skipped:
            for step in (step for steps in steps_of.values() for step in steps):
                step.segment.num_steps -= 1
        else:
            for group, parts in zip(self.groups, self.parts, strict=True):
                self._step_host_parts_now(group, parts, scaled(steps_of[group], coefficient))
            on_device.run(coefficient)
            self.synchronize()
        if self._accumulation is not None:
            self._accumulation.reset()

    def _step_host_parts_now(self, group: Group, parts: Sequence[Part], steps: list[SegmentStep]) -> None:
        if not steps:
            return
        for part in parts:
            if part.tier is Tier.DEVICE:
                continue
            grads = group.grads()[part.start : part.stop] if part.accumulator is None else None
            group.gate.close()
            try:
                self._step_host_part_now(part, steps, grads)
            except BaseException as error:
                group.gate.open(None, error)  # whoever reads the group would wait for ever
                raise

    def _step_host_part_now(self, part: Part, steps: list[SegmentStep], grads: torch.Tensor | None) -> None:
        """`grads`: of the part, behind what has been issued on the current stream; None: its accumulator."""
        if part.streamed:
            assert self._streamed is not None
            self._streamed.after_current()
            self._streamed.run(part, steps, grads)
            return
        self._stepper.streams.step_after_current()
        grads = part.accumulator if grads is None else grads
        assert grads is not None
        self._stepper.step_host_part(part, steps, grads)

    def _gradient_sums(self) -> torch.Tensor:
        """Sum of squares of each group's gradient, float64 [groups]."""
        device = self.groups[0].device if self.groups else torch.device("cpu")
        sums = torch.zeros(len(self.groups), dtype=torch.float64, device=device)
        for index, group in enumerate(self.groups):
            if any(s.param.grad is not None for s in group.segments):
                sums[index] = self._stepper.device.sum_squares(group.grads())
        return sums

    def _take_norm(self, sums: torch.Tensor) -> float:
        """Sets `grad_norm` and `skipped`; returns the clipping coefficient."""
        self.grad_norm = global_norm(sums, self._process_groups) / self._grad_scale
        self.skipped = not math.isfinite(self.grad_norm)
        limit = self.options.max_grad_norm
        if self.skipped or limit == 0:
            coefficient = 1.0
        else:
            # torch.nn.utils.clip_grad_norm_'s formula, in double precision
            coefficient = min(1.0, limit / (self.grad_norm + 1e-6))
        self.policy.observe(self.grad_norm, struck=self.skipped or coefficient < 1)
        return coefficient

    def _step_overlapped(self, overlap: OverlappedSteps) -> None:
        overlap.flush()
        if overlap.speculated:
            for group in self.groups:
                group.check_unwritten(STEP_TAKEN)
        else:
            self.follow_parameters()
        overlap.prepare()
        coefficient = self._take_norm(overlap.sums)
        overlap.finish(coefficient, self.skipped)
        overlap.speculate_next = self._speculates()

    def _speculates(self) -> bool:
        """Whether the next step is taken during backward."""
        # taking a step back is exact but for rounding: nothing that `auto` does where overflows are ordinary
        overflows = self._grad_scale != 1 or any(group.dtype == torch.float16 for group in self.groups)
        rounded = not self.options.state_format.is_exact
        if (overflows or rounded) and self.options.schedule is Schedule.AUTO:
            return False
        return self.policy.speculates and can_be_taken_back(self.param_groups)

    def _step_accumulated(self, overlap: OverlappedSteps, accumulation: GradientAccumulation) -> None:
        accumulation.settle()
        self._begin_step()
        coefficient = self._take_norm(accumulated_sums(self.parts, self._stepper))
        if self.skipped:
            accumulation.reset()
            return
        steps_of = {
            group: scaled([self._begin_segment(s) for s in group.segments if s in accumulation.with_grad], coefficient)
            for group in self.groups
        }
        accumulation.with_grad.clear()
        overlap.finish_accumulated(steps_of)

    def _begin_segment(self, segment: Segment) -> SegmentStep:
        """Counts the segment's step and takes the hyperparameters as they are now."""
        segment.num_steps += 1
        return self._segment_step(segment)

    def _segment_step(self, segment: Segment) -> SegmentStep:
        """The segment's step by its count and the hyperparameters as they are now."""
        pg = self.param_groups[self._param_group_of[segment.param]]
        beta1, beta2 = pg["betas"]
        hyper = AdamWHyper(
            float(pg["lr"]),
            beta1,
            beta2,
            pg["eps"],
            pg["weight_decay"],
            segment.num_steps,
            grad_scale=1 / self._grad_scale,
            bias_correction=pg["bias_correction"],
        )
        return SegmentStep(segment, hyper)

    def set_grad_scale(self, scale: float) -> None:
        """Says that gradients carry the factor `scale`, from the coming step on, as a scaled loss gives it to them.

        Norm, clipping and step take gradient / scale: for powers of two to the bit what they take without a scale, for
        others with one rounding to float32 more. Overflows are ordinary then, and a step that must not be is known
        only when all gradients are there: with a scale other than 1 schedule `auto` is `deferred`.
        Raises ValueError for a scale that is not positive and finite, and for schedules that step during backward.
        Call before backward: where the step was taken in it, `step` raises RuntimeError.
        """
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"grad scale: expected a positive finite number, got {scale}")
        early = self.options.schedule in (Schedule.SPECULATIVE, Schedule.IMMEDIATE)
        if scale != 1 and early and self._overlap is not None and self._accumulation is None:
            raise ValueError(
                f"grad scale {scale}: schedule {self.options.schedule} steps before it is known whether a gradient has "
                "overflowed, and taking the step back is not exact; choose auto, deferred or synchronous"
            )
        self._grad_scale = scale
        if self._overlap is not None:
            self._overlap.speculate_next = self._speculates()

    # ---- the parameters outside of a step -------------------------------------------------------------------------

    def _segments(self) -> Iterator[tuple[Segment, list[Part]]]:
        for group, parts in zip(self.groups, self.parts, strict=True):
            for segment in group.segments:
                yield segment, parts

    def _begin_step(self) -> None:
        """Before anything of a step: the one before is whole, and the masters are those of the parameters."""
        if self._overlap is not None:
            check_hyperparameters(self.param_groups)  # backward may take the step
            self._overlap.drain()
            self._overlap.speculate_next = self._speculates()  # they may have been edited
            if self._accumulation is None and not self._overlap.speculate_next:
                return  # backward has only begun, and parameters may be written until step() takes the step
        self.follow_parameters()

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Masters are read from parameters that somebody else has written since the last step.

        Weights loaded after the optimizer was built would otherwise be overwritten by stale masters at the first step.
        """
        self.synchronize()
        for segment, parts in self._segments():
            if not segment.is_seen():
                for part in parts:
                    part.read_master(segment)
                segment.mark_seen()

    def synchronize(self) -> None:
        """Makes the current stream see every updated shard. For readers and writers other than FSDP2's all-gather."""
        for group in self.groups:
            group.gate.wait()

    # ---- what it did ----------------------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """`skipped`, by the name that Accelerate and scripts for DeepSpeed look for."""
        return self.skipped

    @property
    def last_schedule(self) -> Schedule:
        """When the host tier stepped, or steps, in the last call of `step`; `synchronous` without a host tier."""
        if self._overlap is None:
            return Schedule.SYNCHRONOUS
        if self._accumulation is not None or not self._overlap.speculated:
            return Schedule.DEFERRED
        return Schedule.IMMEDIATE if self.options.schedule is Schedule.IMMEDIATE else Schedule.SPECULATIVE

    @property
    def worker_threads(self) -> dict[int, str]:
        """The operating system's ids of the threads that step the host tier, with names; none where the caller does."""
        return {} if self._overlap is None else self._overlap.threads

    def take_thread_spans(self) -> list[ThreadSpan]:
        """When threads of the compiled kernel had work, since the last call."""
        return self._stepper.host.take_spans()

    def take_device_gate_s(self) -> float:
        """Seconds that all-gather streams waited at the gates since the last call, measured by the device.

        Call where the device has been waited for anyway.
        """
        return sum(group.gate.take_device_wait_s() for group in self.groups)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; per parameter `step`, `master`, `exp_avg`, `exp_avg_sq` on the CPU, as DTensors when sharded."""
        self.follow_parameters()
        return optimizer_state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a `state_dict` of the same parameters into the tiers and writes the parameters from the masters.

        Raises ValueError for other parameters, RuntimeError where backward has taken the coming step already.
        """
        if self._overlap is not None:
            self._overlap.refuse_mid_step("load states")
        load_optimizer_state(self, state_dict)

    def close(self) -> None:
        """Waits for a step under way, ends the threads, unlocks the pages and lets go of the parameters' gradients.

        The optimizer cannot step afterwards; another one may be made of the same parameters.
        """
        self._closed = True
        if self._accumulation is not None:
            self._accumulation.close()
        if self._overlap is not None:
            self._overlap.close()
        if self._streamed is not None:
            self._streamed.synchronize()
        self._stepper.streams.synchronize()
        for slab in self._slabs:
            slab.close()
        self._stepper.host.close()
        if self._stepper.ring is not None:
            self._stepper.ring.close()
