"""A plain training loop on one process: torch.optim, unsharded. What every engine is compared with."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from parity_api.models import MAKERS, micro_batches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, WEIGHT_DECAY, CLIP, SCALE = 1e-2, 0.1, 0.5, 2.0**8


@dataclass(frozen=True)
class Curve:
    """What a run did."""

    losses: list[float]
    """Mean over all rows of each step."""
    norms: list[float]
    weights: dict[str, torch.Tensor]
    """After the last step: float32 masters, and frozen parameters as they are."""


@cache
def plain_curve(model_name: str, precision: str, world_size: int, accumulation: int) -> Curve:
    """Forward and backward in `precision`, everything else in float32; each micro-batch counts the same.

    A single micro-batch per rank and step leaves its reduced gradient in the parameters' dtype, as sharded training
    does; more of them add up in float32.
    """
    masters = MAKERS[model_name]()
    dtype = DTYPES[precision]
    working = copy.deepcopy(masters)
    for param in working.parameters():
        param.data = param.data.to(dtype)
    pairs = [(p, m) for p, m in zip(working.parameters(), masters.parameters(), strict=True) if m.requires_grad]
    optimizer = torch.optim.AdamW([m for _, m in pairs], lr=LR, weight_decay=WEIGHT_DECAY, foreach=False)
    scale = SCALE if precision == "fp16" else 1 / world_size
    divisor = SCALE * world_size if precision == "fp16" else 1.0
    losses, norms = [], []
    for batches in micro_batches(model_name, world_size * accumulation, dtype):
        totals: dict[nn.Parameter, torch.Tensor] = {}
        loss_sum = 0.0
        for batch in batches:
            loss = working(**batch)["loss"]
            (loss * (scale / accumulation)).backward()
            for param, master in pairs:
                if param.grad is not None:
                    totals[master] = totals.get(master, 0.0) + param.grad.float()
                    param.grad = None
            loss_sum += loss.item()
        losses.append(loss_sum / len(batches))
        for master, total in totals.items():
            master.grad = (total if accumulation > 1 else total.to(dtype).float()) / divisor
        with_grad = [m for _, m in pairs if m.grad is not None]
        norms.append(float(nn.utils.clip_grad_norm_(with_grad, CLIP, foreach=False)))
        assert math.isfinite(norms[-1])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in pairs:
                param.copy_(master)
    frozen = {name: p.float() for name, p in working.named_parameters() if not p.requires_grad}
    return Curve(losses, norms, {name: m.detach() for name, m in masters.named_parameters()} | frozen)
