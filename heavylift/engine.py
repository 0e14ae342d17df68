"""Engine: one optimizer step of a sharded model, conducted. The parts do the work.

    micro-batches -> forward -> loss -> backward (FSDP2 reduces, gradients accumulate) -> step on the tiers

The loss is the sum over trained tokens divided by their number over all micro-batches and ranks of the step, so it
does not depend on how the samples are cut into micro-batches and spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from heavylift.models.chunked_loss import Targets
from heavylift.models.loss_head import find_loss_head
from heavylift.offload.groups import make_group
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.timeline import Activity
from heavylift.sharding import ShardedModel
from heavylift.transfer import HostScalar, to_device


class MicroBatch(Protocol):
    """What the engine needs of a batch; `heavylift.data.batches.Batch` is one."""

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [batch, seq], right-padded with any valid id."""

    @property
    def labels(self) -> torch.Tensor:
        """int64 [batch, seq]: the token to predict at each position, -100 where there is none."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Mean over the trained tokens of the step, all ranks and micro-batches."""
    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """True when the norm was not finite: weights and states are as before."""


def sum_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies over positions with a label, float32.

    logits: [batch, seq, vocab], any float dtype; labels: int64 [batch, seq], -100 where nothing is predicted.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


class Engine:
    """Holds the sharded model and its optimizer and runs steps and evaluations."""

    def __init__(self, sharded: ShardedModel, optimizer: TieredAdamW, device: torch.device) -> None:
        self.sharded = sharded
        self.optimizer = optimizer
        self.device = device
        self._loss_head = find_loss_head(sharded.module)
        self._loss_host = HostScalar(device)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.sharded.module

    def train_step(self, micro_batches: Sequence[MicroBatch], num_trained_tokens: int) -> StepResult:
        """Forward and backward of this rank's micro-batches, then one optimizer step.

        `num_trained_tokens`: over ALL ranks and micro-batches of the step. Every rank passes equally many
        micro-batches (without trained tokens where it has none): each is a collective.
        """
        assert num_trained_tokens > 0, f"{num_trained_tokens=}"
        self.module.train()
        loss_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        timeline = self.optimizer.timeline
        with attention_kernels(self.device):
            for index, batch in enumerate(micro_batches):
                self.sharded.set_last_micro_batch(index == len(micro_batches) - 1)
                with timeline.measure(Activity.FORWARD):
                    batch_sum = self._loss_sum(batch)
                # gradients are summed over ranks, so each rank divides by the global count
                with timeline.measure(Activity.BACKWARD):
                    (batch_sum / num_trained_tokens).backward()
                loss_sum += batch_sum.detach()
        # before the step, which waits for the device once, for the norm: whoever asked for the loss after it would wait
        # for the steps of the device's states too, and issue nothing of the next forward meanwhile
        dist.all_reduce(loss_sum)
        self._loss_host.send(loss_sum)
        with timeline.measure(Activity.OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=self._loss_host.take() / num_trained_tokens,
            grad_norm=self.optimizer.grad_norm,
            skipped=self.optimizer.skipped,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], num_trained_tokens: int) -> float:
        """Mean loss over the trained tokens of all ranks' batches (equally many on every rank)."""
        self.module.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with attention_kernels(self.device):
            for batch in batches:
                loss_sum += self._loss_sum(batch)
        self.sharded.reshard()
        dist.all_reduce(loss_sum)
        return float(loss_sum) / num_trained_tokens

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        # no attention mask: with padding on the right, causal attention never lets a real token see a pad
        input_ids = to_device(batch.input_ids, self.device)
        if self._loss_head is not None:
            targets = Targets.of(batch.labels, self.device)
            return self._loss_head.loss_sum(self.module, input_ids, targets)
        labels = to_device(batch.labels, self.device)
        return sum_token_losses(self.module(input_ids=input_ids, use_cache=False).logits, labels)


def attention_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """On CUDA: cuDNN's attention first (6% faster than flash on Hopper), then flash, then the others."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices with weight decay, everything with fewer dimensions without.

    One group when there is no decay. Frozen parameters are left out.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if weight_decay == 0:
        return [{"params": params, "weight_decay": 0.0}]
    decayed = [p for p in params if p.ndim >= 2]
    rest = [p for p in params if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    sharded: ShardedModel,
    param_groups: list[dict[str, Any]],
    options: TieredOptions,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> TieredAdamW:
    """The tiered optimizer over the gather groups of a sharded, loaded model."""
    groups = [make_group(g.name, g.params, g.module) for g in sharded.groups]
    return TieredAdamW(
        param_groups, lr=lr, betas=betas, eps=eps, groups=[g for g in groups if g is not None], options=options
    )
