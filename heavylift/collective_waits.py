"""How long forward and backward stand still for collectives: all-gathers and reduce-scatters of FSDP2, the last
gradients' reduction included.

A collective that runs beside the computation costs nothing, so its own length says little. On a GPU three moments are
timed by the device itself: when the computation comes to the point where it needs the result, when the collective
began (behind the gate and the copies that feed it) and when it was done. From the later of the first two to the third
the computation waited. The host never looks at these events inside forward or backward. Without a GPU a collective
blocks the thread that trains, for all its length (but stage 0's all-reduces, which FSDP2 lets nobody see there).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from heavylift.sharding import ShardedModel, param_group

_MAX_WAITS = 65536
"""A run that nobody asks keeps so many of the last ones."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """One point at which the computation needs a collective's result. All three are events of the same device."""

    needed: torch.cuda.Event
    began: torch.cuda.Event | None
    """What was waited for before it was something else: a gate. None: waiting counts from `needed` on."""
    done: torch.cuda.Event

    @property
    def is_over(self) -> bool:
        return self.needed.query() and self.done.query()

    def seconds(self, base: torch.cuda.Event) -> float:
        """`base`: an event before the three."""
        needed_ms, done_ms = base.elapsed_time(self.needed), base.elapsed_time(self.done)
        began_ms = needed_ms if self.began is None else base.elapsed_time(self.began)
        return max(0.0, done_ms - max(needed_ms, began_ms)) / 1e3


def _now() -> torch.cuda.Event:
    """The moment at which the current stream comes here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Blocked:
    """Seconds that the training thread was blocked in collectives, on a machine without a GPU."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _TimedAllGather(AllGather):
    """The all-gather of a group, with its beginning and its end."""

    def __init__(self, inner: AllGather, blocked: _Blocked | None) -> None:
        """`inner`: does the work. `blocked`: takes the time where there is no GPU."""
        self._inner = inner
        self._blocked = blocked
        self.last: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Of the last one that nobody has waited for yet."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._blocked is not None:
            start_s = time.perf_counter()
            work = self._inner(output_tensor, input_tensor, group, async_op)
            self._blocked.seconds += time.perf_counter() - start_s
            return work
        # In FSDP2's stream for all-gathers, behind the copy that feeds it. What a script starts by name without
        # waiting for it (`unshard(async_op=True)`) runs in NCCL's own stream, whose end no event here would see.
        began = None if async_op else _now()
        work = self._inner(output_tensor, input_tensor, group, async_op)
        self.last = None if began is None else (began, _now())
        return work


class _TimedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, with its end."""

    def __init__(self, blocked: _Blocked | None, ends: deque[torch.cuda.Event]) -> None:
        super().__init__()
        self._blocked = blocked
        self._ends = ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        work = super().__call__(*args, **kwargs)
        if self._blocked is not None:
            self._blocked.seconds += time.perf_counter() - start_s
        else:
            self._ends.append(_now())
        return work


class CollectiveWaits:
    """Adds up what the computation of one model waits for collectives."""

    def __init__(self, sharded: ShardedModel, device: torch.device) -> None:
        """Call once, after the optimizer has been made: its gates sit in the all-gathers, and stay there."""
        self._blocked = None if device.type == "cuda" else _Blocked()
        self._waits: deque[_Wait] = deque(maxlen=_MAX_WAITS)
        self._reduce_ends: deque[torch.cuda.Event] = deque(maxlen=64)
        """Of reduce-scatters whose end nobody has waited for yet."""
        self._tail: _Wait | None = None
        """The wait for the last gradients, while it grows."""
        self._base = _now() if device.type == "cuda" else None
        if dist.get_world_size() == 1:
            return  # there are no collectives
        for group in sharded.groups:
            self._observe(group.module)

    def take_s(self) -> float:
        """Seconds since the last call. Call where the device has been waited for anyway: what it has not passed yet is
        left for the next call."""
        if self._blocked is not None:
            seconds, self._blocked.seconds = self._blocked.seconds, 0.0
            return seconds
        assert self._base is not None
        seconds = 0.0
        while self._waits and self._waits[0].is_over:
            seconds += self._waits.popleft().seconds(self._base)
        if not self._waits:
            self._base = _now()  # milliseconds in float32 lose their fractions within the hour
        return seconds

    def _observe(self, module: Any) -> None:
        group = param_group(module)
        if group is None:
            return
        assert isinstance(module, FSDPModule)
        gather = _TimedAllGather(group._all_gather_comm, self._blocked)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(_TimedReduceScatter(self._blocked, self._reduce_ends))
        if self._blocked is None:
            # where FSDP2 makes the computation's stream wait; it has no hooks there
            group.wait_for_unshard = self._behind(group.wait_for_unshard, lambda: self._need_parameters(gather))
            group.post_backward = self._behind(group.post_backward, lambda: self._need_input(group.comm_ctx))
            group.finalize_backward = self._at_the_end(group.finalize_backward)

    @staticmethod
    def _behind(method: Callable[..., None], note: Callable[[], None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            note()
            method(*args)

        return noted

    def _need_parameters(self, gather: _TimedAllGather) -> None:
        self._tail = None  # another forward or backward
        if gather.last is not None:
            self._waits.append(_Wait(_now(), *gather.last))
            gather.last = None

    def _need_input(self, comm_ctx: Any) -> None:
        """The oldest reduce-scatter's input is about to be freed. (torch before 2.13 keeps one.)"""
        if len(self._reduce_ends) >= getattr(comm_ctx, "reduce_scatter_max_input_buffers", 1):
            self._waits.append(_Wait(_now(), None, self._reduce_ends.popleft()))

    def _at_the_end(self, finalize: Callable[[], None]) -> Callable[[], None]:
        """Backward ends when all gradients are reduced, those of stage 0's all-reduces too: group after group. (Groups
        whose inputs need no gradient, an embedding, are reduced only here, between the ends of others.)"""

        def finalize_timed() -> None:
            if self._tail is None:
                self._tail = _Wait(_now(), None, torch.cuda.Event(enable_timing=True))
                self._waits.append(self._tail)
            finalize()
            self._reduce_ends.clear()
            self._tail.done.record()

        return finalize_timed
