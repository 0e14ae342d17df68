"""TieredAdamW: AdamW whose states live on the device and the host tier, as a `torch.optim.Optimizer`.

One step: norm of all gradients -> per group, in forward order: gradient D2H into staging -> step on its tier ->
updated shard H2D -> the group's gate opens. The device part of a group steps where it lies.

This is the synchronous step: it begins when backward has ended and returns when every group has been handed to its
gate. It is the specification that overlapped schedules must equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heavylift.config.schema import Tier
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.gates import install_gate
from heavylift.offload.gradients import GradientAccumulation, global_norm, shard_process_groups
from heavylift.offload.groups import Group, Segment, num_shards, plain_groups
from heavylift.offload.kernels import device_kernel, host_kernel
from heavylift.offload.staging import Slot, StagingRing
from heavylift.offload.state_dict import load_optimizer_state, optimizer_state_dict
from heavylift.offload.states import Part, allocate_parts
from heavylift.offload.tiers import TierUsage, place

NUM_STAGING_SLOTS = 2  # the copy back of one group overlaps the step of the next


@dataclass(frozen=True)
class TieredOptions:
    """Where the states go and who steps them."""

    tier: Tier = Tier.DEVICE
    ratio: float = 1.0
    """With the host tier: share of the states there."""
    accumulate: bool = False
    """Add up the gradients of several backward passes in float32."""
    max_grad_norm: float = 0.0
    """Clip the global norm to this; 0: no clipping."""
    num_threads: int = 1
    """Threads of the CPU step."""
    cpu_ids: tuple[int, ...] | None = None
    """Cores that those threads are pinned to."""
    native: bool = True
    """Use the compiled CPU kernel where it is there."""


class TieredAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) on tiers.

    `params` and the hyperparameters are those of `torch.optim.AdamW`: parameters or parameter groups with their own
    lr, betas, eps and weight_decay; LR schedulers work. `groups`: the gather groups of a sharded model, in forward
    order (see `heavylift.offload.groups.make_group`); without them plain parameters are grouped by dtype and device.
    Masters start from the parameters and follow them when somebody else writes them (loading weights).

    Clipping belongs to the step (`options.max_grad_norm`): the coefficient multiplies the float32 gradient inside the
    kernel. A step whose norm is not finite is skipped: weights and states keep their bits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        groups: Sequence[Group] | None = None,
        options: TieredOptions | None = None,
    ) -> None:
        self._laid_out = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.options = options or TieredOptions()
        self.usage = TierUsage()
        self.grad_norm = 0.0
        """Global norm of the last step's gradients, before clipping."""
        self.skipped = False
        """Whether the last step was skipped because that norm was not finite."""
        self.num_skipped_steps = 0
        trainable = [p for pg in self.param_groups for p in pg["params"] if p.requires_grad]
        self.groups: tuple[Group, ...] = tuple(plain_groups(trainable) if groups is None else groups)
        self._param_group_of = self._index_param_groups()
        self._process_groups = shard_process_groups(self.groups)
        self._allocate()
        self._laid_out = True

    def _index_param_groups(self) -> dict[nn.Parameter, int]:
        index = {p: i for i, pg in enumerate(self.param_groups) for p in pg["params"] if p.requires_grad}
        grouped = {s.param for group in self.groups for s in group.segments}
        assert grouped == set(index), (
            f"{len(grouped ^ set(index))} parameters are in a gather group or a parameter group only"
        )
        return index

    def _allocate(self) -> None:
        options = self.options
        device = self.groups[0].device if self.groups else torch.device("cpu")
        self._host = host_kernel(options.native, options.num_threads, options.cpu_ids)
        self._device = device_kernel(device)
        device_numels = place([g.numel for g in self.groups], options.ratio, options.tier)
        self.parts, self._slab = allocate_parts(self.groups, device_numels, options.accumulate, self.usage)
        self._ring = self._allocate_ring(device)
        self._d2h_stream, self._h2d_stream = _side_streams(device)
        for group in self.groups:
            if group.module is not None:
                install_gate(group.module, group.gate, num_shards(group.segments[0].param))
        self._accumulation = (
            GradientAccumulation(self.groups, self.parts, self._host, self._device, self._ring)
            if options.accumulate
            else None
        )
        self._follow_parameters()

    def _allocate_ring(self, device: torch.device) -> StagingRing | None:
        numel = max((p.numel for parts in self.parts for p in parts if p.tier is Tier.HOST), default=0)
        if numel == 0:
            return None
        dtypes = {group.dtype for group in self.groups}
        assert len(dtypes) == 1, f"one ring serves groups of one dtype, got {dtypes}"
        dtype = dtypes.pop()
        grad_dtype = torch.float32 if self.options.accumulate else dtype
        return StagingRing.allocate(
            NUM_STAGING_SLOTS, numel, dtype, grad_dtype, pinned=device.type == "cuda", usage=self.usage
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at construction only: the states are laid out once."""
        if self._laid_out:
            raise RuntimeError("TieredAdamW lays out its states once; give all parameter groups at construction")
        super().add_param_group(param_group)

    # ---- one step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Norm, then every group in turn. Returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_parameters()
        active = self._segments_with_gradient()
        self.grad_norm = global_norm(self._sums_of_squares(active), self._process_groups)
        self.skipped = not math.isfinite(self.grad_norm)
        if self.skipped:
            self.num_skipped_steps += 1
        else:
            self._step_groups(active, self._clip_coefficient())
        if self._accumulation is not None:
            self._accumulation.reset()
        return loss

    def _clip_coefficient(self) -> float:
        limit = self.options.max_grad_norm
        # torch.nn.utils.clip_grad_norm_'s formula, in double precision
        return min(1.0, limit / (self.grad_norm + 1e-6)) if limit > 0 else 1.0

    def _segments_with_gradient(self) -> set[Segment]:
        if self._accumulation is not None:
            return self._accumulation.with_grad
        return {s for group in self.groups for s in group.segments if s.param.grad is not None}

    def _sums_of_squares(self, active: set[Segment]) -> list[torch.Tensor]:
        sums = []
        for segment, parts in self._segments():
            if segment not in active or segment.numel == 0:
                continue
            if self._accumulation is None:
                grad = segment.grad()
                assert grad is not None
                sums.append(self._device.sum_squares(grad))
                continue
            for part in parts:
                where = part.overlap(segment)
                if where is not None:
                    assert part.accumulator is not None
                    kernel = self._host if part.tier is Tier.HOST else self._device
                    sums.append(kernel.sum_squares(part.accumulator[where]))
        return sums

    def _step_groups(self, active: set[Segment], clip_coefficient: float) -> None:
        if self._h2d_stream is not None:
            # shards are overwritten from a side stream: everything that reads them has been issued on this one
            self._h2d_stream.wait_stream(torch.cuda.current_stream())
        for group, parts in zip(self.groups, self.parts, strict=True):
            segments = [s for s in group.segments if s in active]
            for segment in segments:
                segment.num_steps += 1
            for part in parts:
                if part.tier is Tier.DEVICE:
                    self._step_device_part(part, segments, clip_coefficient)
                else:
                    self._step_host_part(part, segments, clip_coefficient)
            for segment in segments:
                segment.mark_seen()

    def _step_device_part(self, part: Part, segments: Sequence[Segment], clip_coefficient: float) -> None:
        for segment in segments:
            where = part.overlap(segment)
            if where is None:
                continue
            inside = part.overlap_in_segment(segment)
            grad = part.accumulator[where] if part.accumulator is not None else _grad(segment)[inside]
            self._device.step(
                part.master[where],
                part.exp_avg[where],
                part.exp_avg_sq[where],
                grad,
                segment.shard()[inside],
                self._hyper(segment, clip_coefficient),
            )

    def _step_host_part(self, part: Part, segments: Sequence[Segment], clip_coefficient: float) -> None:
        assert self._ring is not None
        inside = [s for s in segments if part.overlap(s) is not None]
        if not inside:
            return
        group = part.group
        slot = self._ring.next_slot()
        group.gate.close()
        if part.accumulator is None:
            self._grads_to_host(part, inside, slot)
            grads = slot.grad_host
        else:
            grads = part.accumulator
        for run, hyper in self._runs(part, inside, clip_coefficient):
            self._host.step(
                part.master[run], part.exp_avg[run], part.exp_avg_sq[run], grads[run], slot.param_host[run], hyper
            )
        with _on(self._h2d_stream):
            for segment in inside:
                where = part.overlap(segment)
                shard = segment.shard()[part.overlap_in_segment(segment)]
                shard.copy_(slot.param_host[where], non_blocking=True)
        slot.free_event = None if self._h2d_stream is None else self._h2d_stream.record_event()
        group.gate.open(slot.free_event)

    def _grads_to_host(self, part: Part, segments: Sequence[Segment], slot: Slot) -> None:
        """Brings the part's gradients into the slot: in one copy where they lie in one buffer."""
        if self._d2h_stream is not None:
            self._d2h_stream.wait_stream(torch.cuda.current_stream())
        flat = part.group.flat_grad()
        with _on(self._d2h_stream):
            if flat is not None:
                slot.grad_host[: part.numel].copy_(flat[part.start : part.stop], non_blocking=True)
            else:
                for segment in segments:
                    source = _grad(segment)[part.overlap_in_segment(segment)]
                    slot.grad_host[part.overlap(segment)].copy_(source, non_blocking=True)
        if self._d2h_stream is not None:
            self._d2h_stream.synchronize()

    def _runs(
        self, part: Part, segments: Sequence[Segment], clip_coefficient: float
    ) -> Iterator[tuple[slice, AdamWHyper]]:
        """Neighbouring segments with the same hyperparameters as one range: fewer, longer kernel calls."""
        run: slice | None = None
        run_hyper: AdamWHyper | None = None
        for segment in segments:
            where = part.overlap(segment)
            assert where is not None
            hyper = self._hyper(segment, clip_coefficient)
            if run is not None and run.stop == where.start and hyper == run_hyper:
                run = slice(run.start, where.stop)
                continue
            if run is not None and run_hyper is not None:
                yield run, run_hyper
            run, run_hyper = where, hyper
        if run is not None and run_hyper is not None:
            yield run, run_hyper

    def _hyper(self, segment: Segment, clip_coefficient: float) -> AdamWHyper:
        pg = self.param_groups[self._param_group_of[segment.param]]
        beta1, beta2 = pg["betas"]
        return AdamWHyper(
            lr=float(pg["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=pg["eps"],
            weight_decay=pg["weight_decay"],
            step=segment.num_steps,
            grad_scale=clip_coefficient,
        )

    # ---- the parameters outside of a step -------------------------------------------------------------------------

    def _segments(self) -> Iterator[tuple[Segment, list[Part]]]:
        for group, parts in zip(self.groups, self.parts, strict=True):
            for segment in group.segments:
                yield segment, parts

    def _follow_parameters(self) -> None:
        """Masters are read from parameters that somebody else has written since the last step.

        Weights loaded after the optimizer was built would otherwise be overwritten by stale masters at the first step.
        """
        for segment, parts in self._segments():
            if not segment.is_seen():
                self.synchronize()
                for part in parts:
                    part.read_master(segment)
                segment.mark_seen()

    def synchronize(self) -> None:
        """Makes the current stream see every updated shard. For readers other than FSDP2's all-gather."""
        for group in self.groups:
            group.gate.wait()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; per parameter `step`, `master`, `exp_avg`, `exp_avg_sq` on the CPU, as DTensors when sharded."""
        return optimizer_state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a `state_dict` of the same parameters into the tiers and writes the parameters from the masters."""
        load_optimizer_state(self, state_dict)

    def close(self) -> None:
        """Ends the threads and unlocks the pages. The optimizer cannot step afterwards."""
        self._host.close()
        if self._ring is not None:
            self._ring.close()


def _grad(segment: Segment) -> torch.Tensor:
    grad = segment.grad()
    assert grad is not None, f"{segment.name} has no gradient"
    return grad


def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """Streams for the two directions of the bus, made once (new streams per step grow the allocator's pools)."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
