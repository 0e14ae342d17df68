"""heavylift's side: jobs for the ranks of a pool, through `initialize`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks.gather import whole
from torch import nn

import heavylift
from heavylift.offload.access import find_states
from heavylift.offload.optimizer import TieredAdamW
from parity_api.models import MAKERS, dealt, micro_batches
from parity_api.plain import CLIP, DTYPES, LR, SCALE, WEIGHT_DECAY, Curve


@dataclass(frozen=True)
class Case:
    """One run of the matrix."""

    model: str = "branches"
    stage: int = 3
    device: str = "none"
    precision: str = "fp32"
    accumulation: int = 1


def ds_config(case: Case, world_size: int, **more: Any) -> dict[str, Any]:
    """The ds_config.json of a case; `more` are further top-level keys."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.device != "none":
        zero["offload_optimizer"] = {"device": case.device, "ratio": 0.7}
    blocks: dict[str, Any] = {}
    if case.precision == "bf16":
        blocks["bf16"] = {"enabled": True}
    if case.precision == "fp16":
        blocks["fp16"] = {"enabled": True, "initial_scale_power": int(math.log2(SCALE))}
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": zero,
        **blocks,
        **more,
    }


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter by name, whole, float32: the master where there is one. A collective."""
    from heavylift.api.shards import gather

    engine.settle()
    result = {}
    for name, param in engine.module.named_parameters():
        states = find_states(engine.optimizer, param) if isinstance(engine.optimizer, TieredAdamW) else None
        result[name] = whole(param).float() if states is None else gather(param, states.read("master")).clone()
    return result


def train(engine: Any, model_name: str, precision: str, accumulation: int, steps: slice = slice(None)) -> Curve:
    """The steps of the data on this rank's share, in the way of a script."""
    world_size = dist.get_world_size()
    data = micro_batches(model_name, world_size * accumulation, DTYPES[precision])
    losses, norms = [], []
    for batches in data[steps]:
        loss_sum = torch.zeros((), device=engine.device)
        for batch in dealt(batches, dist.get_rank(), world_size):
            loss = engine(**{key: value.to(engine.device) for key, value in batch.items()})["loss"]
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / len(batches))
        norms.append(engine.get_global_grad_norm())
    return Curve(losses, norms, masters(engine))


def run_cases_job(cases: Sequence[Case]) -> list[Curve]:
    """Each case from a fresh model. Other ranks than the first begin with other weights, which must not count."""
    curves = []
    for case in cases:
        model = MAKERS[case.model]()
        if dist.get_rank() > 0:
            for param in model.parameters():
                nn.init.normal_(param)
        engine, *_ = heavylift.initialize(
            model=model, config=ds_config(case, dist.get_world_size()), model_parameters=model.parameters()
        )
        curves.append(train(engine, case.model, case.precision, case.accumulation))
        engine.destroy()
    return curves
