"""Gradients between backward and the step: accumulation in float32, and the global norm.

Without accumulation the step reads `param.grad`, the reduced gradient in the parameters' dtype, as FSDP2 leaves it.
With accumulation every reduced gradient is added in float32 to the accumulator of its part, on the part's tier, and
`param.grad` is dropped at once. FSDP2 reduces in float32 and then rounds to the parameters' dtype; the sum here takes
the value from before that rounding. The host's part is added at once, with backward standing still (the specification,
under schedule synchronous), or by the worker beside backward (`heavylift.offload.additions`): the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from heavylift.config.schema import Tier
from heavylift.offload.additions import HostAdditions
from heavylift.offload.groups import Group, Segment, local_tensor, padded_numel
from heavylift.offload.hooks import listen_to_gradients
from heavylift.offload.states import Part
from heavylift.offload.stepping import PartStepper
from heavylift.offload.timeline import Activity
from heavylift.offload.worker import Worker


class GradientAccumulation:
    """Adds up reduced gradients as they appear in backward."""

    def __init__(
        self,
        groups: Sequence[Group],
        parts: Sequence[Sequence[Part]],
        stepper: PartStepper,
    ) -> None:
        self._stepper = stepper
        self._reduced: tuple[Group, torch.Tensor] | None = None
        """FSDP2's float32 buffer, until all of its gradients are taken: it would lie beside the next activations."""
        self._num_left = 0
        """Elements of the buffer that have not been taken."""
        self._parts = dict(zip(groups, parts, strict=True))
        self._groups = tuple(groups)
        self._closed = False
        self._additions: HostAdditions | None = None
        self.with_grad: set[Segment] = set()
        """Segments that got a gradient since the last step."""
        for group in groups:
            if isinstance(group.module, FSDPModule) and group.dtype != torch.float32:
                group.module.set_all_reduce_hook(partial(self._on_reduced, group))
        self._hooks = listen_to_gradients(self._groups, self)

    def add_on(self, worker: Worker) -> None:
        """From here on `worker` adds the host's parts, beside backward."""
        numel = max((part.numel for ps in self._parts.values() for part in ps if part.tier is Tier.HOST), default=0)
        if numel > 0:
            assert self._stepper.ring is not None
            self._additions = HostAdditions(worker, self._stepper, self._stepper.ring.grads_host(numel))

    def settle(self) -> None:
        """Waits until every gradient so far is in the accumulators. Raises RuntimeError when an addition failed."""
        if self._additions is not None:
            self._additions.settle()

    def _on_reduced(self, group: Group, flat: torch.Tensor) -> None:
        """FSDP2 hands over the group's flat float32 gradient, before it rounds it."""
        if self._closed:
            return
        if flat.is_cuda:
            # the buffer belongs to the reduce-scatter stream, which may re-use it once FSDP2 lets it go
            flat.record_stream(torch.cuda.current_stream())
        # FSDP2 calls the hooks of this group's parameters next: one buffer at a time is enough
        self._reduced, self._num_left = (group, flat), flat.numel()

    @torch.no_grad()
    def on_grad(self, group_index: int, segment_index: int) -> None:
        """Runs for each parameter, in the stream that reduced it, right after `_on_reduced`."""
        group = self._groups[group_index]
        segment = group.segments[segment_index]
        param = segment.param
        assert param.grad is not None
        grad = local_tensor(param.grad)
        if self._reduced is not None and self._reduced[0] is group:
            flat = self._reduced[1]
            # the rounded gradients are views of one buffer in the layout of the float32 one
            source = flat[grad.storage_offset() : grad.storage_offset() + grad.numel()]
            self._num_left -= padded_numel(param)
            if self._num_left == 0:
                self._reduced = None
        else:
            source = grad.reshape(-1)
        for part in self._parts[group]:
            where = part.overlap(segment)
            if where is not None:
                self._add(group_index, part, where, source[part.overlap_in_segment(segment)])
        if self._additions is not None and segment_index == len(group.segments) - 1:
            self._additions.hand_over(group_index, group.name)
        param.grad = None
        self.with_grad.add(segment)

    def _add(self, group_index: int, part: Part, where: slice, grad: torch.Tensor) -> None:
        assert part.accumulator is not None
        if part.tier is Tier.DEVICE:
            self._stepper.device.accumulate(part.accumulator[where], grad)
            return
        if self._additions is not None:
            self._additions.add(group_index, part.group.name, part.accumulator[where], grad, part.home_event)
            return
        assert self._stepper.ring is not None
        part.wait_until_home()
        with self._stepper.timeline.measure(Activity.ACCUMULATE, part.group.name):
            staged = self._stepper.ring.grads_host(grad.numel())
            staged.copy_(grad, non_blocking=True)
            if grad.is_cuda:
                torch.cuda.current_stream().synchronize()
            self._stepper.host.accumulate(part.accumulator[where], staged)

    def reset(self) -> None:
        """Forgets everything added: after a step, whether it was applied or skipped, and after `settle`."""
        for parts in self._parts.values():
            for part in parts:
                assert part.accumulator is not None
                part.wait_until_home()
                part.accumulator.zero_()
        self.with_grad.clear()
        self._reduced = None

    def close(self) -> None:
        """Lets go of the parameters and the states."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._additions = None
        self._groups = ()
        self._parts.clear()  # FSDP2 has no way to take back the hook that leads here
        self._reduced = None
        self._closed = True


def shard_process_groups(groups: Sequence[Group]) -> list[dist.ProcessGroup]:
    """Process groups over which the parameters are sharded: summing over them makes a local sum global.

    Replicated dimensions are left out: there every rank holds the same gradient, which counts once.
    """
    for group in groups:
        for segment in group.segments:
            param = segment.param
            if isinstance(param, DTensor):
                axes = [axis for axis, p in enumerate(param.placements) if isinstance(p, Shard)]
                return [param.device_mesh.get_group(axis) for axis in axes if param.device_mesh.size(axis) > 1]
    return []


def accumulated_sums(parts: Sequence[Sequence[Part]], stepper: PartStepper) -> torch.Tensor:
    """Sum of squares of each group's accumulated gradient, float64 [groups], on the CPU."""
    sums = torch.zeros(len(parts), dtype=torch.float64)
    for index, group_parts in enumerate(parts):
        for part in group_parts:
            assert part.accumulator is not None
            part.wait_until_home()
            kernel = stepper.host if part.tier is Tier.HOST else stepper.device
            sums[index] += kernel.sum_squares(part.accumulator).cpu()
    return sums


def global_norm(sums: torch.Tensor, process_groups: Sequence[dist.ProcessGroup]) -> float:
    """Root of the sum of squares over all groups and shards. `sums`: float64 [groups], this rank's.

    Every rank gets the same value (NaN or inf if any rank has one). float64, so that neither the number of ranks nor
    the tier shows in the float32 clipping coefficient.
    """
    total = sums.sum()
    for process_group in process_groups:
        if total.device.type == "cpu" and dist.get_backend(process_group) == "nccl":
            total = total.cuda()
        dist.all_reduce(total, group=process_group)
    return float(total.sqrt())
