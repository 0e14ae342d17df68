"""What a run says on the screen: start banner, progress with time left beside the step lines, end summary.

Rank 0 only; the caller decides who that is. On a terminal a bar stays below the printed lines. Elsewhere (a file, a
pipe) there are no control characters, and a printed line now and then carries the time left. Texts are built by
plain functions, so that they can go into a file as well. Left out: colours in the lines, and any measuring.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from heavylift.config.schema import Schedule, Tier
from heavylift.train.metrics import RunMetrics, StepMetrics
from heavylift.units import GIB

ETA_EVERY_S = 30.0


class Progress:
    """Steps done and time left, on standard output (or `stream`). Use as a context manager.

    `num_steps`: optimizer steps of the run. `clock` gives seconds and is there for tests.
    """

    def __init__(
        self, num_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._done = 0
        self._start_s = self._first_done_s = self._eta_shown_s = clock()
        self._bar: RichProgress | None = None
        console = Console(file=self._stream, highlight=False)
        # isatty, not console.is_terminal: FORCE_COLOR must not put a bar into a log file
        if self._stream.isatty() and not console.is_dumb_terminal:
            self._bar = RichProgress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("eta {task.fields[eta]}"),
                console=console,
                transient=True,
                # the redraw thread takes the interpreter lock from the training loop
                refresh_per_second=2,
            )
            self._task = self._bar.add_task("training", total=num_steps, eta="-")

    def __enter__(self) -> Self:
        self._start_s = self._first_done_s = self._eta_shown_s = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def eta_s(self) -> float | None:
        """Seconds left by the mean of the steps so far, None before the first; evaluations between them count."""
        if self._done == 0:
            return None
        now_s, num_left = self._clock(), self._num_steps - self._done
        if self._done == 1:
            return num_left * (self._first_done_s - self._start_s)
        # the first step compiles and allocates: it would spoil the mean
        return num_left * (now_s - self._first_done_s) / (self._done - 1)

    def advance(self) -> None:
        """One more optimizer step is done."""
        self._done += 1
        if self._done == 1:
            self._first_done_s = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, eta=_eta_text(self.eta_s))

    def print(self, line: str) -> None:
        """Print a line (or several) above the bar; without a bar, with the time left at its end now and then."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        now_s = self._clock()
        if self.eta_s and now_s - self._eta_shown_s >= ETA_EVERY_S:
            self._eta_shown_s = now_s
            line = f"{line}  eta: {_eta_text(self.eta_s)}"
        # flushed: someone may be following the log file
        print(line, file=self._stream, flush=True)


def _eta_text(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def format_duration(seconds: float) -> str:
    """`seconds` as h:mm:ss, rounded to whole seconds: 3725.4 becomes 1:02:05."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{whole_seconds:02d}"


@dataclass(frozen=True)
class RunSummary:
    """What the start banner tells. Bytes are per process unless named otherwise."""

    model: str
    num_params: int
    num_trainable_params: int
    param_dtype: str
    """Of the parameters in forward and backward, e.g. `bfloat16`."""
    states: str
    """How the optimizer's masters and moments are stored."""
    micro_batch: int
    accumulation_steps: int
    num_ranks: int
    num_steps: int
    zero_stage: int
    optimizer_tier: Tier
    host_ratio: float
    """Share of the optimizer states on the host; counts only where `optimizer_tier` is the host."""
    schedule: Schedule
    """When the host's part is stepped."""
    planned_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """What the plan expects to be in use at the peak, for each tier."""
    planned_parts: Sequence[tuple[str, Tier, int]] = ()
    """What that consists of: (name, tier, bytes)."""
    device_is_host: bool = False
    """There is no accelerator: what stands for its memory is host memory too."""

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation_steps * self.num_ranks


def banner(summary: RunSummary) -> str:
    """The block of lines that opens a run."""
    share = summary.num_trainable_params / max(summary.num_params, 1)
    rows = {
        "model": summary.model,
        "parameters": f"{summary.num_trainable_params:,} trained of {summary.num_params:,} ({share:.1%})",
        "dtype": f"parameters {summary.param_dtype}, {summary.states}",
        "batch": f"{summary.effective_batch} samples per step = {summary.micro_batch} per process"
        f" x {summary.accumulation_steps} accumulated x {_count(summary.num_ranks, 'process', 'processes')}",
        "steps": f"{summary.num_steps:,}",
        "sharding": f"ZeRO stage {summary.zero_stage}",
        "optimizer": _placement(summary),
    }
    if summary.planned_bytes:
        rows["plan"] = _plan(summary)
    return _block(rows)


def _plan(summary: RunSummary) -> str:
    """The sums of the tiers, and a line for each part below them."""
    word = " tier" if summary.device_is_host else ""
    planned = ", ".join(f"{tier.value}{word} {size / GIB:.2f}GiB" for tier, size in summary.planned_bytes.items())
    where = "all in host memory: " if summary.device_is_host else ""
    lines = [f"{where}{planned} per process"]
    parts = [(name, tier.value + word, f"{size / GIB:.2f}GiB") for name, tier, size in summary.planned_parts]
    widths = [max(map(len, column)) for column in zip(*parts, strict=True)]
    for name, tier_name, size_text in parts:
        lines.append(
            f"{'':12}   {name:<{widths[0]}}  {tier_name:<{widths[1]}}  {size_text:>{widths[2]}}",
        )
    return "\n".join(lines)


def _placement(summary: RunSummary) -> str:
    if summary.optimizer_tier is Tier.DEVICE:
        return "states on the device" + (" tier, which is host memory here" if summary.device_is_host else "")
    if summary.host_ratio == 1:
        where = "states on the host"
    else:
        where = f"states {summary.host_ratio:.1%} on the host, {1 - summary.host_ratio:.1%} on the device"
    return f"{where}, schedule {summary.schedule.value}"


def end_summary(metrics: RunMetrics, model_dir: str, next_commands: Sequence[str] = ()) -> str:
    """The block of lines that closes a run; what was never finite or never measured is left out."""
    rows = {"model": model_dir}
    losses = [step.loss for step in metrics.steps]
    if line := _first_last(losses):
        rows["loss"] = f"{line} in {_count(len(losses), 'step', 'steps')}"
    if line := _first_last([evaluation.eval_loss for evaluation in metrics.evals]):
        rows["eval loss"] = line
    if num_skipped := sum(step.skipped for step in metrics.steps):
        rows["skipped"] = f"{_count(num_skipped, 'step', 'steps')} with a gradient that was not finite"
    if metrics.steps:
        rows["tokens/s"] = f"{statistics.median(step.tokens_per_s for step in metrics.steps):,.0f} (median)"
        device_gib, host_gib = _peaks(metrics.steps)
        # nothing was ever allocated on a device where there is none
        on_device = f"device {device_gib:.2f}GiB, " if device_gib > 0 else ""
        rows["peak memory"] = f"{on_device}host {host_gib:.2f}GiB"
    for number, command in enumerate(next_commands):
        rows["try next" if number == 0 else " " * number] = command
    return _block(rows)


def _first_last(losses: Sequence[float]) -> str | None:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return None
    return f"{finite[0]:.4f} -> {finite[-1]:.4f}" if len(finite) > 1 else f"{finite[0]:.4f}"


def _peaks(steps: Sequence[StepMetrics]) -> tuple[float, float]:
    return max(step.mem_device_gib for step in steps), max(step.mem_host_gib for step in steps)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _block(rows: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items())
