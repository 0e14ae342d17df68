"""What is asked of the optimizer: where its states go, who steps them and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.offload.staging import RingSize


@dataclass(frozen=True)
class TieredOptions:
    """Where the states go, who steps them and when."""

    tier: Tier = Tier.DEVICE
    ratio: float = 1.0
    """With the host tier: share of the states there."""
    schedule: Schedule = Schedule.SYNCHRONOUS
    """When the host tier steps. The others need exactly one backward per step, or `accumulate`."""
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
    state_format: StateFormat = StateFormat.FP32
    """How master and moments are stored."""
    gradients_on: Tier = Tier.HOST
    """Where overlapped schedules keep the gradients that the CPU steps until then: on the host, copied as they come, or
    on the device, copied when it is their turn."""
    streamed_share: float = 0.0
    """With the host tier: share of its elements that the GPU steps, their states streamed over the bus and back."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("tier", Tier),
            ("gradients_on", Tier),
            ("schedule", Schedule),
            ("state_format", StateFormat),
        ):
            # a plain string would be none of the members that it is compared with
            object.__setattr__(self, name, kind(getattr(self, name)))
        for name in ("ratio", "streamed_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number from 0 to 1, got {getattr(self, name)}")
        if self.schedule is Schedule.IMMEDIATE and self.max_grad_norm > 0:
            raise ValueError(
                f"schedule immediate knows no clipping: expected max_grad_norm 0, got {self.max_grad_norm}"
            )
        if not self.state_format.is_exact and self.schedule in (Schedule.IMMEDIATE, Schedule.SPECULATIVE):
            raise ValueError(
                f"with state format {self.state_format} a step that schedule {self.schedule} has taken too early "
                "cannot be taken back: choose auto, deferred or synchronous"
            )
        if self.state_format is StateFormat.INT8 and self.streamed_share > 0:
            raise ValueError(f"states in format int8 are not streamed: expected 0, got {self.streamed_share:g}")

    @property
    def has_host_tier(self) -> bool:
        """Whether any states are on the host."""
        return self.tier is Tier.HOST and self.ratio > 0

    @property
    def without_effect(self) -> list[str]:
        """Options that say something and have no effect beside the others, each with why."""
        found = []
        if self.tier is Tier.HOST and self.gradients_on is Tier.DEVICE and not self.keeps_gradients:
            why = "gradients are added up on the host" if self.accumulate else "no step is overlapped"
            found.append(f"gradients_on: without effect, as {why}")
        if self.tier is Tier.HOST and self.streamed_share > 0 and self.ratio == 0:
            found.append("streamed_share: without effect, as ratio is 0")
        return found

    @property
    def overlapped(self) -> bool:
        """Whether the host tier steps on a worker thread."""
        return self.tier is Tier.HOST and self.ratio > 0 and self.schedule is not Schedule.SYNCHRONOUS

    @property
    def keeps_gradients(self) -> bool:
        """Whether the reduced gradients of the host tier wait for their step one by one, as they come in backward."""
        return self.overlapped and not self.accumulate

    def ring_size(self, by_cpu: Sequence[int], streamed: Sequence[int], dtype: torch.dtype) -> RingSize | None:
        """What the staging ring holds; None where nothing passes through. `by_cpu`: elements of the host parts that the
        CPU steps; `streamed`: of those that the GPU does; `dtype`: of the parameters."""
        # gradients that are added up come down for streamed parts too
        numel = max((*by_cpu, *(streamed if self.accumulate else ())), default=0)
        if numel == 0:
            return None
        fetches_grads = not self.accumulate and (not self.overlapped or self.gradients_on is Tier.DEVICE)
        return RingSize(numel, dtype, len(by_cpu) > 0, fetches_grads, self.accumulate)
