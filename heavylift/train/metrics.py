"""What a step reports: the record, its line on the screen, its line in metrics.jsonl, and reading that file back.

metrics.jsonl holds one strict JSON object per line: step records with exactly the fields of `StepMetrics`, and
evaluation records `{"step", "eval_loss"}`. A value that is not finite is written as null (JSON has no NaN). This
module does not reduce over ranks and does not time anything: the caller hands in final numbers.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from heavylift.config.words import counted
from heavylift.errors import UserError
from heavylift.train.waits import StepWaits
from heavylift.units import GIB


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all ranks where nothing else is said."""

    step: int
    """Optimizer steps taken, this one included: the first is 1."""
    loss: float
    """Mean over the trained tokens of the step."""
    grad_norm: float
    """Global gradient norm before clipping; not finite where the step was skipped."""
    lr: float
    """Learning rate of this very step."""
    step_s: float
    """Wall-clock seconds from the end of the step before to the end of this one, reporting included: a step ends when
    its norm is known, while the device is still at work. An evaluation between the two, or a trace that is written, is
    left out: there, and for the first step, from when this one begins."""
    tokens: int
    """Real tokens (no pads) of the step."""
    tokens_per_s: float
    tflops: float
    """Per process, by the SuperOffload examples' formula (`flops.examples_flops`)."""
    model_tflops: float
    """Per process, by `flops.model_flops`."""
    mem_device_gib: float
    """Peak allocated device memory so far, of the process that has most."""
    mem_host_gib: float
    """Resident memory of the processes."""
    collective_wait_s: float
    """Seconds that forward and backward stood still for collectives, mean over processes; 0 with one process."""

    @property
    def skipped(self) -> bool:
        """The gradient was not finite, so no parameter was changed."""
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation: the loss on the held-out samples after `step` optimizer steps (0: before the first)."""

    step: int
    eval_loss: float


@dataclass(frozen=True)
class RunMetrics:
    """What `read_metrics` found, each in file order."""

    steps: tuple[StepMetrics, ...]
    evals: tuple[EvalMetrics, ...]


class MetricsWriter:
    """Appends records to `path`, each written at once, so that a killed run keeps all its steps.

    What the disk refuses (it is full) is kept, told once and tried again with the next record: the run is worth more.
    A context manager; only one process of a run may hold it. Raises UserError where the file cannot be opened.
    """

    def __init__(self, path: Path | str) -> None:
        try:
            # unbuffered: how much of a line a full disk has taken is then known
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{path}: expected to be able to append metrics, got {error.strerror}; change train.output_dir"
            ) from None
        self._unwritten = b""
        self._told = False

    def write(self, record: StepMetrics | EvalMetrics | StepWaits) -> None:
        """Append one line."""
        values = {key: _finite_or_none(value) for key, value in asdict(record).items()}
        self._unwritten += (json.dumps(values, allow_nan=False) + "\n").encode()
        self._write_out()

    def _write_out(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._told:
                self._tell(f"cannot be written: {error.strerror}; the run goes on and tries again: free the disk")
            self._told = True
        else:
            self._told = False

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file.closed:
            return
        self._write_out()
        if self._unwritten:
            lost = counted(len(self._unwritten.splitlines()), "line")
            self._tell(f"the last {lost} could not be written")
        self._file.close()

    def _tell(self, what: str) -> None:
        print(f"{self._file.name}: {what}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _finite_or_none(value: int | float | str | None) -> int | float | str | None:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def read_metrics(path: Path | str) -> RunMetrics:
    """Read metrics.jsonl; null becomes NaN. A last line without its newline (a killed run) is left out.

    Raises UserError, naming file and line, where the file is missing or a line is not a record of ours.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise UserError(f"{path}: expected a readable metrics.jsonl, got {reason}; check the path") from None
    steps: list[StepMetrics] = []
    evals: list[EvalMetrics] = []
    complete = text[: text.rfind("\n") + 1]
    for number, line in enumerate(complete.split("\n")[:-1], start=1):
        record = _parse(line, f"{path}:{number}")
        if isinstance(record, StepMetrics):
            steps.append(record)
        else:
            evals.append(record)
    return RunMetrics(tuple(steps), tuple(evals))


def _parse(line: str, where: str) -> StepMetrics | EvalMetrics:
    try:
        values: Any = json.loads(line)
    except json.JSONDecodeError:
        values = None
    if isinstance(values, dict):
        numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in values.items()}
        if all(isinstance(value, int | float) for value in numbers.values()):
            for kind in (StepMetrics, EvalMetrics):
                if numbers.keys() == {field.name for field in fields(kind)}:
                    return kind(**numbers)
    raise UserError(f"{where}: expected a step or evaluation record, got {line[:80]!r}; give a metrics.jsonl")


def step_line(metrics: StepMetrics, offload: str = "") -> str:
    """The one line of a step for people. No colour, no newline; a skipped step is marked at the end.

    `offload`: what the host tier's step cost (`waits.waits_text`).
    """
    parts = [
        f"step: {metrics.step}",
        f"loss: {metrics.loss:.4f}",
        f"grad_norm: {metrics.grad_norm:.4f}",
        f"lr: {metrics.lr:.1e}",
        f"tokens/s: {metrics.tokens_per_s:,.0f}",
        f"tflops: {_short(metrics.tflops)} (model {_short(metrics.model_tflops)})",
        f"memory: device {metrics.mem_device_gib:.2f}GiB host {metrics.mem_host_gib:.2f}GiB",
    ]
    if metrics.collective_wait_s > 0:
        parts.append(f"collectives: {metrics.collective_wait_s:.2f}s")
    if offload:
        parts.append(offload)
    if metrics.skipped:
        parts.append("SKIPPED: gradient not finite, nothing updated")
    return "  ".join(parts)


def _short(tflops: float) -> str:
    # a small model on a CPU does thousandths of a TFLOPS: keep two digits that say something
    return f"{tflops:.2f}" if not 0 < tflops < 0.1 else f"{tflops:.2g}"


def eval_line(metrics: EvalMetrics) -> str:
    """The one line of an evaluation for people."""
    return f"step: {metrics.step}  eval_loss: {metrics.eval_loss:.4f}"


def memory_now() -> tuple[float, float]:
    """Memory of this process in GiB: (peak allocated on its current device so far, resident host memory now).

    The first is 0.0 without CUDA. Reduce over ranks yourself: the maximum of the first; the host memories add up
    (pages that processes share are then counted more than once).
    """
    import psutil
    import torch

    device_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return device_bytes / GIB, psutil.Process().memory_info().rss / GIB
