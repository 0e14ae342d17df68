"""Gates: a group's next all-gather waits for the group's updated shard.

A shard that comes back from the host is written on a side stream. Whoever reads it next is FSDP2's all-gather, which
knows nothing of that stream: without a gate it gathers stale weights and nothing is raised. The gate sits where FSDP2
lets us in: the `allocate()` of a custom all-gather runs in the copy-in stream, just before the shard is read there
(true because the shards have the dtype they are gathered in). At one shard FSDP2 skips the all-gather and with it the
gate, so there a forward pre-hook waits instead, and `unshard()` does when it is called by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from heavylift.offload.timeline import Activity, Timeline


class Gate:
    """Closed while updates of a group's shard are under way; each is opened with the event of the copy that ends it."""

    def __init__(self, on_settled: Callable[[], None] | None = None) -> None:
        """`on_settled` runs in the first reader's thread after the updates are whole."""
        self._condition = threading.Condition()
        self._num_pending = 0
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._settled = True
        self._on_settled = on_settled
        self.waited_s = 0.0
        """Seconds that readers' threads were blocked here since it was last set to 0."""
        self._timeline: Timeline | None = None
        self._label = ""
        self._device_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._device_wait_taken = True

    def observe(self, timeline: Timeline, label: str) -> None:
        """From here on waits are reported to `timeline`, and those of readers' streams are timed."""
        self._timeline, self._label = timeline, label

    def take_device_wait_s(self) -> float:
        """Seconds that the stream of the first reader since the last call waited for the copy; 0 where none did.

        Call where the device has been waited for anyway: what it has not passed yet is left for the next call.
        """
        if self._device_wait_taken or self._device_wait is None or not self._device_wait[1].query():
            return 0.0
        self._device_wait_taken = True
        return self._device_wait[0].elapsed_time(self._device_wait[1]) / 1e3

    def close(self) -> None:
        """From here on readers wait. Called before an update is handed to anybody; one `open` per `close`."""
        with self._condition:
            self._num_pending += 1
            self._settled = False

    def open(self, event: torch.cuda.Event | None, error: BaseException | None = None) -> None:
        """One update is done: readers go on, after `event` on their own stream (None: already whole).

        With `error`, readers raise it: a step that failed on another thread must not be trained over.
        """
        with self._condition:
            assert self._num_pending > 0, "a gate was opened that nobody had closed"
            self._num_pending -= 1
            self._event = event or self._event
            self._error = error or self._error
            self._condition.notify_all()

    def wait(self) -> None:
        """Makes the current stream wait for the updated shard; blocks the thread while its copy is not yet issued."""
        if self._num_pending:
            start_s = time.perf_counter()
            with self._condition:
                self._condition.wait_for(lambda: self._num_pending == 0)
            self.waited_s += time.perf_counter() - start_s
            if self._timeline is not None:
                self._timeline.add(Activity.GATE, self._label, start_s)
        if self._error is not None:
            raise RuntimeError("the optimizer step of this group failed") from self._error
        if self._event is not None:
            self._wait_on_stream(self._event)
        if not self._settled:
            self._settled = True
            if self._on_settled is not None:
                self._on_settled()

    def _wait_on_stream(self, event: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream()
        if self._settled or self._timeline is None:
            stream.wait_event(event)
            return
        # timed by the device itself: the host never looks at these events inside forward or backward
        if self._device_wait is None:
            self._device_wait = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._device_wait[0].record(stream)
        stream.wait_event(event)
        self._device_wait[1].record(stream)
        self._device_wait_taken = False


class GatedAllGather(DefaultAllGather):
    """FSDP2's all-gather, with the group's gate in front of reading the shard."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called in the copy-in stream before the shard is copied: the last moment to wait."""
        self._gate.wait()
        return super().allocate(size, dtype=dtype, device=device)


def install_gate(module: nn.Module, gate: Gate, num_shards: int) -> None:
    """Puts `gate` in front of every read of the shards that `module` gathers.

    Call after `fully_shard`. `num_shards`: ranks that the parameters are sharded over.
    """
    if num_shards > 1:
        assert isinstance(module, FSDPModule), f"{type(module)} is not under fully_shard"
        module.set_custom_all_gather(GatedAllGather(gate))
        return
    if isinstance(module, FSDPModule):
        _unshard_behind(module, gate)
    if module._compiled_call_impl is not None:
        _stand_in_front(module, gate)
        return
    # prepend: before FSDP2's own pre-hook, which at one shard reads the shard itself
    handle = module.register_forward_pre_hook(lambda *_: gate.wait(), prepend=True)
    compile_module = module.compile

    # `module.compile()` traces the pre-hooks too, and would wait at the gate once, while it compiles, and never again
    def compile_behind_gate(*args: Any, **kwargs: Any) -> None:
        handle.remove()
        compile_module(*args, **kwargs)
        _stand_in_front(module, gate)

    module.compile = compile_behind_gate  # type: ignore[method-assign]


def _unshard_behind(module: FSDPModule, gate: Gate) -> None:
    """What a script calls; FSDP2 itself takes another way in forward, behind the pre-hook."""
    unshard = module.unshard

    def unshard_behind_gate(async_op: bool = False) -> Any:
        gate.wait()
        return unshard(async_op)

    module.unshard = unshard_behind_gate  # type: ignore[method-assign]


def _stand_in_front(module: nn.Module, gate: Gate) -> None:
    """Of the compiled call."""
    compiled = module._compiled_call_impl
    assert compiled is not None, type(module)

    def gated(*args: Any, **kwargs: Any) -> Any:
        gate.wait()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = gated
