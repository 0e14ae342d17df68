"""Where the time of a step goes: named timers, the breakdown of `wall_clock_breakdown`, samples per second.

On CUDA a timer records events in the current stream and is read later, so that measuring does not make the host wait;
reading waits for the last event. Elsewhere the clock of the host is read. Left out: where the optimizer's step on the
host tier waits (`heavylift.offload.timeline` measures that), memory (`heavylift.api.memory_usage`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from heavylift.api.memory_usage import memory_line
from heavylift.errors import UserError


class Phase(StrEnum):
    """Parts of a step, by the names that the monitors show. `forward`, `backward`, `step` follow each other."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INNER = "backward_inner"
    """Inside of `backward`: the gradients, and what of their reduction overlaps them."""
    BACKWARD_ALLREDUCE = "backward_allreduce"
    """Inside of `backward`: what of the reduction is left after the last gradient."""
    STEP = "step"


Mark = float | torch.cuda.Event
"""A moment: seconds of the host's clock, or an event in a CUDA stream."""


_MAX_UNREAD = 64
_MAX_RECORDS = 1024


def mark_now(device: torch.device) -> Mark:
    """This moment, on `device`'s current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Milliseconds from `start` to `end`; on CUDA waits until `end` is reached."""
    if isinstance(start, float):
        assert isinstance(end, float), (start, end)
        return (end - start) * 1000.0
    assert not isinstance(end, float), (start, end)
    end.synchronize()
    return float(start.elapsed_time(end))


def default_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Timer:
    """Adds up the time between pairs of `start` and `stop`."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self._started: Mark | None = None
        self._unread: list[tuple[Mark, Mark]] = []
        self._total_ms = 0.0
        self._recent_ms: deque[float] = deque(maxlen=_MAX_RECORDS)

    def start(self) -> None:
        """Begins. A start that was never stopped (an exception came between) is forgotten."""
        self._started = mark_now(self.device)

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Ends and keeps the time; `reset` forgets the earlier ones. `record` has no effect: all are kept.

        Raises UserError without a start.
        """
        if self._started is None:
            raise UserError(f"timer {self.name}: stop() without start(); call start() before it")
        now, started = mark_now(self.device), self._started
        if reset:
            self.reset()
        self._unread.append((started, now))
        self._started = None
        if len(self._unread) > 2 * _MAX_UNREAD:
            # of a timer that nobody reads: the older half is long reached, so this does not wait
            self._read(_MAX_UNREAD)

    def _read(self, num_pairs: int) -> None:
        for start, end in self._unread[:num_pairs]:
            self._recent_ms.append(elapsed_ms(start, end))
            self._total_ms += self._recent_ms[-1]
        del self._unread[:num_pairs]

    def records_ms(self) -> list[float]:
        """Milliseconds of each pair since the last reset, of the last 1024 at most."""
        self._read(len(self._unread))
        return list(self._recent_ms)

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds in all since the last reset. A running timer is counted up to now, and runs on."""
        running = self._started is not None
        if running:
            self.stop()
        self._read(len(self._unread))
        total_ms = self._total_ms
        if reset:
            self.reset()
        if running:
            self.start()
        return total_ms

    def mean(self) -> float:
        """Mean of the pairs in milliseconds, without the lowest and highest tenth; 0 without any."""
        return trim_mean(self.records_ms(), 0.1)

    def reset(self) -> None:
        """Forgets everything."""
        self._started = None
        self._unread.clear()
        self._recent_ms.clear()
        self._total_ms = 0.0


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Mean of `data` without the lowest and the highest `trim_percent` (a share, 0 to 1) of it; 0 of nothing."""
    assert 0 <= trim_percent <= 1, trim_percent
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("fwd").start()`. Read once, they are right on CUDA too."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = default_device() if device is None else device
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer of this name, made at first use."""
        if name not in self.timers:
            self.timers[name] = Timer(name, self.device)
        return self.timers[name]

    def get_timers(self) -> dict[str, Timer]:
        """All timers by name."""
        return self.timers

    def elapsed(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Milliseconds over `normalizer` of those of the timers that exist. Raises UserError unless it is above 0."""
        if not normalizer > 0:
            raise UserError(f"timers: expected a normalizer above 0, got {normalizer}")
        return {name: self.timers[name].elapsed(reset) / normalizer for name in names if name in self.timers}

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints the elapsed times on `ranks` (default: rank 0 only), with the memory in use if asked for."""
        line = times_line(self.elapsed(names, normalizer, reset))
        if own_rank() in (ranks or [0]):
            print(line + (f" | {memory_line(self.device)}" if memory_breakdown else ""), flush=True)

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Trimmed mean in milliseconds over `normalizer` of those of the timers that exist."""
        if not normalizer > 0:
            raise UserError(f"timers: expected a normalizer above 0, got {normalizer}")
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    def memory_usage(self) -> str:
        """What memory is in use, in one line."""
        return memory_line(self.device)


def own_rank() -> int:
    """Rank of this process, 0 outside of a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def times_line(times_ms: Mapping[str, float]) -> str:
    """`time (ms) | forward: 12.34 | step: 5.00`."""
    return " | ".join(["time (ms)", *(f"{name}: {value:.2f}" for name, value in times_ms.items())])


class WallClockBreakdown:
    """What `wall_clock_breakdown` shows: milliseconds per optimizer step of each phase, as means since the last print.

    The engine measures each phase with `measure` and calls `step_done` after every optimizer step. `enabled` False
    costs nothing. `steps_per_print` None: every step is printed.
    """

    def __init__(
        self,
        enabled: bool,
        device: torch.device,
        *,
        steps_per_print: int | None = None,
        memory_breakdown: bool = False,
        say: Callable[[str], Any] = lambda line: print(line, flush=True),
    ) -> None:
        self.enabled = enabled
        self.timers = SynchronizedWallClockTimer(device)
        self._every = steps_per_print or 1
        self._memory = memory_breakdown
        self._say = say
        self._num_steps = 0
        self.last_ms: dict[str, float] = {}
        """What was last printed; `get_wall_clock_timers()` of the engine."""

    def measure(self, phase: Phase) -> AbstractContextManager[None]:
        """Measures the block as `phase`."""
        return self._measure(phase) if self.enabled else nullcontext()

    @contextmanager
    def _measure(self, phase: Phase) -> Iterator[None]:
        timer = self.timers(phase)
        timer.start()
        yield
        # not after an exception: the next start forgets this one
        timer.stop()

    def step_done(self, step: int) -> dict[str, float] | None:
        """Optimizer step `step` (from 1) is done. Returns the times where it is time to print, printed on rank 0."""
        if not self.enabled:
            return None
        self._num_steps += 1
        if step % self._every:
            return None
        self.last_ms = self.timers.elapsed([phase.value for phase in Phase], normalizer=self._num_steps)
        self._num_steps = 0
        if own_rank() == 0:
            memory = f" | {memory_line(self.timers.device)}" if self._memory else ""
            self._say(f"step={step} | {times_line(self.last_ms)}{memory}")
        return self.last_ms


@dataclass
class _Speed:
    num_steps: int = 0
    total_ms: float = 0.0


class ThroughputTimer:
    """Samples per second over optimizer steps: from `start` (before forward) to `stop` (after step), pauses left out.

    The first `start_step` steps are not counted: they compile, allocate and warm up. `batch_size`: samples of an
    optimizer step over all ranks.
    """

    def __init__(
        self,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        logging_fn: Callable[[str], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self._say = logging_fn or print
        self._timer = Timer("throughput", default_device() if device is None else device)
        self._running = False
        self._before, self._current = _Speed(), _Speed()

    def update_epoch_count(self) -> None:
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        self._running = True
        if self.global_step_count >= self.start_step:
            self._timer.start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch is done, and with `global_step` the optimizer step. Without a start it does nothing."""
        if not self._running:
            return
        self._running = False
        self.micro_step_count += 1
        if self.global_step_count >= self.start_step:
            self._timer.stop()
            self._current.num_steps += global_step
        self.global_step_count += global_step
        every = self.steps_per_output
        if global_step and report_speed and every and self.global_step_count % every == 0:
            current = self.samples_per_sec()
            self._say(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.6g}, CurrSamplesPerSec={current:.6g}, "
                f"{memory_line(self._timer.device)}"
            )
            self._close_window()

    def _close_window(self) -> None:
        self._before.num_steps += self._current.num_steps
        self._before.total_ms += self._timer.elapsed(reset=True)
        self._current = _Speed()

    def samples_per_sec(self) -> float:
        """Since the last report; 0 where no step was counted yet. On CUDA waits for the device."""
        return self._rate(self._current.num_steps, self._timer.elapsed(reset=False))

    def avg_samples_per_sec(self) -> float:
        """Over all counted steps; 0 where there is none yet. On CUDA waits for the device."""
        total_ms = self._before.total_ms + self._timer.elapsed(reset=False)
        return self._rate(self._before.num_steps + self._current.num_steps, total_ms)

    def _rate(self, num_steps: int, total_ms: float) -> float:
        return self.batch_size * num_steps * 1000.0 / total_ms if total_ms > 0 else 0.0


def progress_line(
    step: int,
    skipped: int,
    lrs: Sequence[float],
    moms: Sequence[Any],
    samples_per_s: float | None = None,
    grad_norm: float | None = None,
) -> str:
    """The line of `steps_per_print`: `step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.999)], samples/s=51.2`."""
    parts = [f"step={step}", f"skipped={skipped}", f"lr={[float(lr) for lr in lrs]}", f"mom={list(moms)}"]
    if grad_norm is not None:
        parts.append(f"grad_norm={grad_norm:.4g}")
    if samples_per_s is not None:
        parts.append(f"samples/s={samples_per_s:.1f}")
    return ", ".join(parts)
