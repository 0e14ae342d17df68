"""What finetune.py tells of its steps: one line each, metrics.jsonl, and the means at the end.

TFLOPS are told by two conventions: that of the SuperOffload examples, so that published numbers compare, and what the
model needs (see `heavylift.train.flops`). Step times are wall clock, the device waited for before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

import heavylift
from heavylift.collective_waits import CollectiveWaits
from heavylift.config.schema import Recipe
from heavylift.data.batches import Batch, BatchPlan
from heavylift.offload.optimizer import TieredAdamW
from heavylift.train.flops import ModelShape
from heavylift.train.metrics import MetricsWriter, StepMetrics, step_line
from heavylift.train.monitors import metrics_events, open_monitors
from heavylift.train.step_metrics import StepMeasure
from heavylift.train.waits import WaitWatch, take_waits, waits_text
from heavylift.transfer import RankNumbers


def wait_for_device() -> None:
    """Until the GPU has done what it was given: without, a step's time is that of handing it out."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StepReport:
    """Rank 0's reports; other ranks only take part in the sums."""

    def __init__(
        self,
        recipe: Recipe,
        plan: BatchPlan,
        num_steps: int,
        hf_config: PretrainedConfig,
        num_params: int,
        engine: heavylift.Engine,
    ) -> None:
        shape = ModelShape.from_config(hf_config.to_dict(), num_params)
        numbers = RankNumbers(engine.device)
        collectives = CollectiveWaits(engine.sharded, engine.device)
        self._num_steps = num_steps
        self._measure = StepMeasure(plan, shape, num_params, recipe.train.recomputes_everything, numbers, collectives)
        assert isinstance(engine.optimizer, TieredAdamW), type(engine.optimizer)
        self._optimizer, self._numbers = engine.optimizer, numbers
        self._watch = WaitWatch(engine.optimizer.worker_threads)
        self.steps: list[StepMetrics] = []
        if dist.get_rank() == 0:
            folder = Path(recipe.train.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "metrics.jsonl"
            path.unlink(missing_ok=True)  # of an earlier run
            self._writer = MetricsWriter(path)
            self._monitors = open_monitors(recipe)

    def step(self, step: int, batches: Sequence[Batch], loss: float, grad_norm: float, lr: float, step_s: float) -> str:
        """One step is done: a line for people. A collective. `step` counts from 0; `loss`: mean over the trained tokens
        of the step."""
        ranges = self._optimizer.timeline.take()
        waits = take_waits(self._watch, step + 1, self._optimizer, ranges, self._numbers)
        offload = "" if waits is None else waits_text(waits)
        metrics = self._measure.of_step(step, batches, loss, grad_norm, lr, step_s)
        self.steps.append(metrics)
        if dist.get_rank() == 0:
            self._writer.write(metrics)
            self._monitors.write_events(metrics_events(metrics))
        return f"{step_line(metrics, offload)}  step_s: {metrics.step_s:.3f}  of {self._num_steps} steps"

    def summary(self, num_left_out: int) -> str:
        """Means over the steps but for the first `num_left_out`."""
        measured = self.steps[num_left_out:] or self.steps
        seconds = sum(m.step_s for m in measured)
        tokens = sum(m.tokens for m in measured)
        # weighted by time, which makes them the work of all steps over the time of all steps
        tflops = sum(m.tflops * m.step_s for m in measured) / seconds
        needed = sum(m.model_tflops * m.step_s for m in measured) / seconds
        left_out = len(self.steps) - len(measured)
        return (
            f"done: {len(self.steps)} steps, loss {self.steps[0].loss:.4f} -> {self.steps[-1].loss:.4f}\n"
            f"means of {len(measured)} steps ({left_out} left out): {seconds / len(measured):.3f} s a step, "
            f"{tokens / seconds:,.0f} tokens/s, {tflops:.4g} TFLOPS per GPU by the examples' formula, "
            f"{needed:.4g} that the model needs"
        )

    def close(self) -> None:
        """Closes files and monitors."""
        if dist.get_rank() == 0:
            self._writer.close()
            self._monitors.close()
