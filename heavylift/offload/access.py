"""Looking into a TieredAdamW from outside of a step: one parameter's master, moments and gradient, this rank's shard.

    states = find_states(optimizer, param)
    states.read("exp_avg")            float32 [numel], a copy on the CPU
    states.write("master", values)    master and parameter follow
    states.read_grad()                wherever the schedule keeps it until the step

Everything here waits for a step under way first. Left out: other ranks (`heavylift.api.parameters` gathers).

Between a backward that has taken the step already (schedules `immediate` and `speculative`) and `step()`, reading gives
the values of that step, and writing raises: what is written would be revised by arithmetic that knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from heavylift.offload.groups import Group, Segment, differs
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.states import STATE_NAMES, Part


@dataclass(frozen=True)
class ParamStates:
    """Where one parameter's shard lies in the optimizer."""

    optimizer: TieredAdamW
    index: int
    """The group's place in the forward order."""
    group: Group
    parts: tuple[Part, ...]
    segment: Segment

    # ---- states ---------------------------------------------------------------------------------------------------

    def read(self, name: str) -> torch.Tensor:
        """A copy of `master`, `exp_avg` or `exp_avg_sq`: float32 [numel] on the CPU."""
        assert name in STATE_NAMES, f"{name=}"
        self._settle()
        if name == "master":
            self._follow()
        result = torch.zeros(self.segment.numel, dtype=torch.float32)
        for part in self.parts:
            where = part.overlap(self.segment)
            if where is not None:
                result[part.overlap_in_segment(self.segment)] = part.read(name, self.segment).cpu()
        return result

    @torch.no_grad()
    def write(self, name: str, values: torch.Tensor) -> None:
        """Sets a state from `values` (any float dtype, [numel]). With `master` the parameter is its rounded value.

        Raises RuntimeError where backward has taken the step already.
        """
        assert name in STATE_NAMES, f"{name=}"
        assert values.numel() == self.segment.numel, f"{values.shape=} {self.segment.numel=}"
        self._settle()
        self._refuse_mid_step(f"set {name}")
        values = values.reshape(-1)
        for part in self.parts:
            part.write(name, self.segment, values)
        if name == "master":
            self.segment.shard().copy_(values)
            self.segment.mark_seen()

    @torch.no_grad()
    def write_changed(self, shard: torch.Tensor) -> None:
        """Sets the parameter from `shard` ([numel], its dtype). Where its bits differ the master becomes the new value;
        elsewhere the master keeps the bits that the parameter's dtype does not show."""
        self._settle()
        self._refuse_mid_step("write the parameter")
        self._follow()
        old = self.segment.shard()
        new = shard.reshape(-1).to(old.device)
        changed = differs(old, new)
        if bool(changed.any()):
            for part in self.parts:
                if part.overlap(self.segment) is not None:
                    inside = part.overlap_in_segment(self.segment)
                    masters = new.float()
                    kept = part.read("master", self.segment).to(new.device)
                    masters[inside] = torch.where(changed[inside], masters[inside], kept)
                    part.write("master", self.segment, masters)
            old.copy_(new)
        self.segment.mark_seen()

    def _follow(self) -> None:
        """What somebody else has written into the parameter comes first."""
        if not self.segment.is_seen():
            for part in self.parts:
                part.read_master(self.segment)
            self.segment.mark_seen()

    # ---- the gradient ---------------------------------------------------------------------------------------------

    def read_grad(self) -> torch.Tensor | None:
        """A copy of the gradient that the coming step will use, before clipping: float32 [numel] on the CPU.

        Without the factor of `set_grad_scale`. None when the parameter has none: before backward, after the step, or
        because it took no part.
        """
        grad = self._read_scaled_grad()
        scale = self.optimizer._grad_scale
        return grad if grad is None or scale == 1 else grad.div_(scale)

    def _read_scaled_grad(self) -> torch.Tensor | None:
        accumulation, overlap = self.optimizer._accumulation, self.optimizer._overlap
        if accumulation is not None:
            accumulation.settle()
            return self._read_accumulated() if self.segment in accumulation.with_grad else None
        grad = self.segment.grad()
        if grad is not None:
            return grad.detach().float().cpu().clone()
        if overlap is None or self.segment not in overlap._state[self.group].arrived:
            return None
        return self._read_kept()

    @torch.no_grad()
    def write_grad(self, values: torch.Tensor) -> None:
        """Sets the gradient that the coming step will use, and with it the norm. values: any float dtype, [numel],
        without the factor of `set_grad_scale`.

        Raises RuntimeError where backward has taken the step already; ValueError where there is no gradient to set.
        """
        self._refuse_mid_step("set the gradient")
        accumulation, overlap = self.optimizer._accumulation, self.optimizer._overlap
        values = values.reshape(-1)
        if self.optimizer._grad_scale != 1:
            values = values.float() * self.optimizer._grad_scale
        if accumulation is not None and self.segment in accumulation.with_grad:
            self._settle()
            accumulation.settle()
            for part, where, inside in self._overlaps():
                assert part.accumulator is not None
                part.wait_until_home()
                part.accumulator[where].copy_(values[inside])
            return
        grad = self.segment.grad()
        if grad is not None:
            grad.copy_(values)
            return
        if overlap is None or self.segment not in overlap._state[self.group].arrived:
            raise ValueError(f"{self.segment.name}: there is no gradient to set between this step and the last")
        self._write_kept(values)

    def _read_accumulated(self) -> torch.Tensor:
        self._settle()
        result = torch.zeros(self.segment.numel, dtype=torch.float32)
        for part, where, inside in self._overlaps():
            assert part.accumulator is not None
            part.wait_until_home()
            result[inside] = part.accumulator[where].cpu()
        return result

    def _read_kept(self) -> torch.Tensor:
        overlap = self.optimizer._overlap
        assert overlap is not None
        state = overlap._state[self.group]
        if state.d2h_event is not None:
            state.d2h_event.synchronize()
        result = torch.zeros(self.segment.numel, dtype=torch.float32)
        for part, where, inside in self._overlaps():
            if part in overlap._kept:
                result[inside] = overlap._kept[part][where].float()
            else:
                assert state.grads_device is not None
                result[inside] = state.grads_device[part.start : part.stop][where].float().cpu()
        return result

    def _write_kept(self, values: torch.Tensor) -> None:
        overlap = self.optimizer._overlap
        assert overlap is not None
        state = overlap._state[self.group]
        if state.d2h_event is not None:
            state.d2h_event.synchronize()
        for part, where, inside in self._overlaps():
            if part in overlap._kept:
                overlap._kept[part][where].copy_(values[inside])
            else:
                assert state.grads_device is not None
                state.grads_device[part.start : part.stop][where].copy_(values[inside])
        # the norm was added up when the gradient arrived
        stepper = self.optimizer._stepper
        total = torch.zeros((), dtype=torch.float64)
        for part in self.parts:
            if part in overlap._kept:
                total += stepper.host.sum_squares(overlap._kept[part]).cpu()
            else:
                assert state.grads_device is not None
                total += stepper.device.sum_squares(state.grads_device[part.start : part.stop]).cpu()
        overlap.sums[self.index] = total

    def _overlaps(self) -> list[tuple[Part, slice, slice]]:
        """The parts that the segment reaches into: where in the part, and where in the segment."""
        pairs = [(part, part.overlap(self.segment)) for part in self.parts]
        return [(part, where, part.overlap_in_segment(self.segment)) for part, where in pairs if where is not None]

    # ---- waiting --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The group's step, if one is under way, is whole, and the current stream sees its shard."""
        self.group.gate.wait()

    def _refuse_mid_step(self, what: str) -> None:
        if self.optimizer._overlap is not None:
            self.optimizer._overlap.refuse_mid_step(f"{what} of {self.segment.name}")


def find_states(optimizer: TieredAdamW, param: nn.Parameter) -> ParamStates | None:
    """Where `param` lies in `optimizer`; None when it is not trained by it."""
    if param not in optimizer._param_group_of:
        return None
    for index, (group, parts) in enumerate(zip(optimizer.groups, optimizer.parts, strict=True)):
        for segment in group.segments:
            if segment.param is param:
                return ParamStates(optimizer, index, group, tuple(parts), segment)
    raise AssertionError("a trained parameter lies in no group")
