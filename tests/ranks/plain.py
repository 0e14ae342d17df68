"""The other side of every comparison: data, and a plain training loop on one process, unsharded, with torch.optim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 16
"""Samples of one optimizer step: 4 ranks x 4 micro-batches x 1 row, or fewer ranks with more rows."""


@dataclass(frozen=True)
class Rows:
    """Padded samples: int64 [rows, seq] each; labels are shifted, -100 where nothing is predicted."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    @property
    def num_trained(self) -> int:
        """Tokens with a label."""
        return int((self.labels != -100).sum())

    def rows(self, start: int, stop: int) -> Rows:
        """Some of the samples, cut to the longest of them, as a micro-batch is."""
        ids, labels = self.input_ids[start:stop], self.labels[start:stop]
        width = max(2, int((ids != 0).sum(1).max()))
        return Rows(ids[:, :width], labels[:, :width])


def make_steps(num_steps: int, vocab_size: int, seed: int = 1, max_length: int = 12) -> list[Rows]:
    """Random samples of uneven length. In every second step only the first five have labels, so that some
    micro-batches (and with four ranks whole ranks) only keep step."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for step in range(num_steps):
        ids = torch.zeros(ROWS, max_length, dtype=torch.int64)
        labels = torch.full((ROWS, max_length), -100)
        for row in range(ROWS):
            length = int(torch.randint(3, max_length + 1, (), generator=generator))
            ids[row, :length] = torch.randint(1, vocab_size, (length,), generator=generator)
            if step % 2 == 0 or row < 5:
                prompt = int(torch.randint(0, length - 1, (), generator=generator))
                labels[row, prompt : length - 1] = ids[row, prompt + 1 : length]
        steps.append(Rows(ids, labels))
    return steps


def micro_batches(step: Rows, rank: int, world_size: int, accumulation: int) -> list[Rows]:
    """This rank's share of a step, dealt as heavylift deals: micro-batch by micro-batch, then rank by rank."""
    per = ROWS // (world_size * accumulation)
    assert per * world_size * accumulation == ROWS, (world_size, accumulation)
    starts = [(a * world_size + rank) * per for a in range(accumulation)]
    return [step.rows(start, start + per) for start in starts]


def loss_sum(model: nn.Module, rows: Rows) -> torch.Tensor:
    """Sum of the token losses, float32."""
    logits = model(input_ids=rows.input_ids, use_cache=False).logits.flatten(0, 1).float()
    return F.cross_entropy(logits, rows.labels.flatten(), ignore_index=-100, reduction="sum")


@dataclass
class Trajectory:
    """What a run did: one loss and gradient norm per step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_train(model: nn.Module, groups: list[dict], steps: Sequence[Rows], lr: float, clip: float) -> Trajectory:
    """AdamW on one process: whole batches, `foreach=False`, clipping by torch's own function."""
    trained = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=lr, foreach=False)
    losses, norms = [], []
    for rows in steps:
        loss = loss_sum(model, rows) / rows.num_trained
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip or float("inf"), foreach=False)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trajectory(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def plain_train_bf16(model: nn.Module, steps: Sequence[Rows], lr: float, weight_decay: float) -> Trajectory:
    """The same for a bfloat16 model: forward and backward in bfloat16, masters and moments in float32."""
    pairs = [(p, p.detach().float().clone().requires_grad_()) for p in model.parameters()]
    optimizer = torch.optim.AdamW([m for _, m in pairs], lr=lr, weight_decay=weight_decay, foreach=False)
    losses, norms = [], []
    for rows in steps:
        loss = loss_sum(model, rows) / rows.num_trained
        loss.backward()
        for param, master in pairs:
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        norms.append(float(nn.utils.clip_grad_norm_([m for _, m in pairs], float("inf"), foreach=False)))
        optimizer.step()
        with torch.no_grad():
            for param, master in pairs:
                param.copy_(master)
        losses.append(loss.item())
    names = [name for name, _ in model.named_parameters()]
    return Trajectory(losses, norms, {n: m.detach() for n, (_, m) in zip(names, pairs, strict=True)})
