"""The record of a step, put together from what it was given and how long it took, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from heavylift.collective_waits import CollectiveWaits
from heavylift.data.batches import Batch, BatchPlan
from heavylift.train.flops import ModelShape, examples_flops, model_flops
from heavylift.train.metrics import StepMetrics, memory_now
from heavylift.transfer import RankNumbers


@dataclass(frozen=True)
class StepMeasure:
    """What all steps of a run have in common."""

    plan: BatchPlan
    shape: ModelShape
    num_params: int
    recomputes: bool
    """Whether every layer's forward runs again in backward."""
    numbers: RankNumbers
    collectives: CollectiveWaits | None = None
    """None: nobody watches them, and 0 is told."""

    def of_step(
        self, step: int, batches: Sequence[Batch], loss: float, grad_norm: float, lr: float, step_s: float
    ) -> StepMetrics:
        """A collective. `step` counts from 0; `batches`: this rank's; `loss`: mean over the step's trained tokens."""
        counted = 0.0
        for batch in batches:
            rows, width = batch.input_ids.shape
            counted += examples_flops(
                self.num_params, self.shape.num_layers, self.shape.hidden, width, rows, self.recomputes
            )
        lengths = self.plan.samples.lengths[self.plan.sample_ids(step)].tolist()
        waited_s = 0.0 if self.collectives is None else self.collectives.take_s()
        on_device, on_host, waited = zip(*self.numbers.gather([*memory_now(), waited_s]), strict=True)
        return StepMetrics(
            step=step + 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_s=step_s,
            tokens=self.plan.num_tokens(step),
            tokens_per_s=self.plan.num_tokens(step) / step_s,
            tflops=counted / step_s / 1e12,
            model_tflops=model_flops(self.shape, lengths) / dist.get_world_size() / step_s / 1e12,
            mem_device_gib=max(on_device),
            mem_host_gib=sum(on_host),
            collective_wait_s=sum(waited) / len(waited),
        )
