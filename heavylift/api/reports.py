"""What an engine tells while it trains, as its configuration asks: monitors, timers, FLOPs, the line of a step.

The engine wraps its forward, backward and step in these methods and calls `micro_step_done` at the end of every
`step()`. On ranks other than 0 nothing is measured or written, and no method is a collective.

    forward -> backward -> step -> micro_step_done(facts at the accumulation boundary, else None)
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heavylift.api.flops_profiler import FlopsProfiler
from heavylift.api.memory_usage import memory_line
from heavylift.api.timers import Phase, ThroughputTimer, WallClockBreakdown, progress_line
from heavylift.config.deepspeed.settings import BatchSizes, Settings
from heavylift.config.run_folder import nearest_parent
from heavylift.errors import UserError
from heavylift.monitor.events import elapsed_events, step_events
from heavylift.monitor.master import MonitorMaster, check_monitors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFacts:
    """An optimizer step that is done, skipped or not."""

    step: int
    """Optimizer steps so far, this one included."""
    num_skipped: int
    global_samples: int
    """Samples so far, all ranks."""
    lrs: Sequence[float]
    """Learning rate of each parameter group, that of the coming step: as DeepSpeed shows it."""
    moms: Sequence[Any]
    """Betas or momentum of each parameter group."""
    loss_scale: float | None = None
    """With float16 only."""
    grad_norm: float | None = None


class _Sizes:
    """What the profiler's report tells about the run."""

    def __init__(self, batch: BatchSizes) -> None:
        self._batch = batch
        self.world_size = batch.train_batch // (batch.micro_batch * batch.accumulation)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation


def check_reports(settings: Settings) -> None:
    """Raises UserError, one line per problem, for what `settings` asks to be told and could not be. Opens nothing."""
    problems: list[str] = []
    try:
        check_monitors(settings.monitors)
    except UserError as error:
        problems += error.problems
    profile = settings.flops_profiler.output_file
    if settings.flops_profiler.enabled and profile is not None:
        problems += _file_problems(profile)
    if problems:
        raise UserError(*problems)


def _file_problems(path: Path) -> list[str]:
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists():
            with path.open("a"):
                pass
        else:
            # really tried: permission bits say nothing to root, nor about read-only file systems
            with tempfile.TemporaryFile(dir=nearest_parent(path)):
                pass
    except OSError as error:
        return [f"flops_profiler.output_file: {path} cannot be written: {error.strerror}; change the path"]
    return []


class EngineReports:
    """Everything that `settings` asks to be told, on rank 0. Raises UserError for a monitor that cannot be opened."""

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        device: torch.device,
        rank: int,
        say: Callable[[str], Any] = lambda line: print(line, flush=True),
    ) -> None:
        self._tells = rank == 0
        self._settings = settings
        self._device = device
        self._say = say
        self.monitor = MonitorMaster(settings.monitors, enabled=self._tells)
        self.breakdown = WallClockBreakdown(
            self._tells and settings.wall_clock_breakdown,
            device,
            steps_per_print=settings.steps_per_print,
            memory_breakdown=settings.memory_breakdown,
            say=say,
        )
        self._throughput: ThroughputTimer | None = None
        if self._tells and settings.steps_per_print:
            self._throughput = ThroughputTimer(settings.batch.train_batch, device=device)
        self._profiler: FlopsProfiler | None = None
        if self._tells and settings.flops_profiler.enabled:
            self._profiler = FlopsProfiler(model, _Sizes(settings.batch), settings.flops_profiler.recompute_fwd_factor)
        self._losses: list[torch.Tensor] = []

    def forward(self, num_steps: int) -> AbstractContextManager[Any]:
        """Around a forward that is trained on, after `num_steps` optimizer steps."""
        return self._forward(num_steps) if self._tells else nullcontext()

    @contextmanager
    def _forward(self, num_steps: int) -> Iterator[None]:
        if self._throughput is not None:
            self._throughput.start()
        profiler = self._profiler if num_steps == self._settings.flops_profiler.profile_step else None
        if profiler is not None:
            profiler.start_profile()
        try:
            with self.breakdown.measure(Phase.FORWARD):
                yield
        finally:
            if profiler is not None:
                profiler.stop_profile()

    def saw_loss(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """`factor` x `loss` is the mean over a micro-batch, a scalar without any scale."""
        if self.monitor.enabled:
            self._losses.append(loss.detach().float().reshape(()) * factor)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a micro-batch.

        The reduction over ranks is inside of it, beside the gradients, so there is no time for it alone.
        """
        with ExitStack() as stack:
            stack.enter_context(self.breakdown.measure(Phase.BACKWARD))
            stack.enter_context(self.breakdown.measure(Phase.BACKWARD_INNER))
            yield

    def step(self) -> AbstractContextManager[None]:
        """Around an optimizer step."""
        return self.breakdown.measure(Phase.STEP)

    def micro_step_done(self, facts: StepFacts | None) -> None:
        """The engine's `step()` is done; `facts` where it was an optimizer step."""
        if not self._tells:
            return
        if self._throughput is not None:
            self._throughput.stop(global_step=facts is not None)
        if facts is None:
            return
        self._print_profile(facts.step)
        times_ms = self.breakdown.step_done(facts.step)
        if self.monitor.enabled:
            self._write_events(facts, times_ms)
        every = self._settings.steps_per_print
        if every and facts.step % every == 0:
            assert self._throughput is not None
            speed = self._throughput.avg_samples_per_sec() or None
            self._say(progress_line(facts.step, facts.num_skipped, facts.lrs, facts.moms, speed, facts.grad_norm))
        if self._settings.memory_breakdown and not self.breakdown.enabled and facts.step % (every or 1) == 0:
            self._say(f"step={facts.step} | {memory_line(self._device)}")

    def _write_events(self, facts: StepFacts, times_ms: dict[str, float] | None) -> None:
        loss = float(torch.stack(self._losses).mean()) if self._losses else None
        self._losses.clear()
        events = step_events(facts.global_samples, float(facts.lrs[0]), loss=loss, loss_scale=facts.loss_scale)
        if times_ms is not None:
            events += elapsed_events(facts.global_samples, times_ms)
        self.monitor.write_events(events)

    def _print_profile(self, step: int) -> None:
        if self._profiler is None or not self._profiler.started:
            return
        asked = self._settings.flops_profiler
        try:
            self._profiler.print_model_profile(
                profile_step=step,
                module_depth=asked.module_depth,
                top_modules=asked.top_modules,
                detailed=asked.detailed,
                output_file=asked.output_file,
            )
        except UserError as error:  # it could be written at the start; training goes on
            logger.warning("%s", error)
        self._profiler.end_profile()

    def close(self) -> None:
        """Ends the monitors."""
        self.monitor.close()
