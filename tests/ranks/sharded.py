"""heavylift's side of every comparison: a model folder -> engine on the ranks of a pool -> what its run did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from heavylift.config.schema import ModelConfig, Schedule, StateFormat, Tier
from heavylift.engine import Engine, StepResult, build_optimizer
from heavylift.models.load import build_on_meta, load_hf_config, load_weights, materialise
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model
from ranks.gather import whole
from ranks.plain import Rows, Trajectory, micro_batches

LR = 1e-2
BETAS = (0.9, 0.999)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """How a run is sharded, placed and stepped."""

    stage: int = 3
    tier: str = "host"
    ratio: float = 1.0
    schedule: str = "synchronous"
    accumulation: int = 1
    clip: float = 0.0
    freeze: tuple[str, ...] = ()
    two_groups: bool = False
    """Matrices and the rest in parameter groups with their own learning rate and decay."""
    dtype: torch.dtype = torch.float32
    native: bool = True
    lr: float = LR
    weight_decay: float = 0.1
    state_format: str = "fp32"
    streamed_share: float = 0.0
    gradients_on: str = "host"


def param_groups(model: nn.Module, setup: Setup) -> list[dict[str, Any]]:
    """The trainable parameters, for heavylift's optimizer and for torch's."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not setup.two_groups:
        return [{"params": params, "lr": setup.lr, "weight_decay": setup.weight_decay}]
    matrices = {"params": [p for p in params if p.ndim >= 2], "lr": setup.lr, "weight_decay": setup.weight_decay}
    rest = {"params": [p for p in params if p.ndim < 2], "lr": setup.lr / 4, "weight_decay": 0.02}
    return [group for group in (matrices, rest) if group["params"]]


def build(folder: Path, setup: Setup) -> Engine:
    """The engine of a pretrained model folder on this rank. A collective."""
    config = ModelConfig(model_name_or_path=str(folder), freeze=setup.freeze)
    model = build_on_meta(load_hf_config(folder, False), config, setup.dtype)
    sharded = shard_model(model, setup.stage, make_mesh(setup.stage, "cpu"))
    materialise(model, CPU)
    load_weights(model, folder)
    options = TieredOptions(
        tier=Tier(setup.tier),
        ratio=setup.ratio,
        schedule=Schedule(setup.schedule),
        accumulate=setup.accumulation > 1,
        max_grad_norm=setup.clip,
        native=setup.native,
        state_format=StateFormat(setup.state_format),
        streamed_share=setup.streamed_share,
        gradients_on=Tier(setup.gradients_on),
    )
    optimizer = build_optimizer(sharded, param_groups(model, setup), options, lr=setup.lr, betas=BETAS, eps=1e-8)
    return Engine(sharded, optimizer, CPU)


def take_step(engine: Engine, rows: Rows, accumulation: int = 1) -> StepResult:
    """One optimizer step on this rank's share of `rows`."""
    mine = micro_batches(rows, dist.get_rank(), dist.get_world_size(), accumulation)
    return engine.train_step(mine, rows.num_trained)


def whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """All parameters by name, gathered. A collective."""
    engine.optimizer.synchronize()
    return {name: whole(p) for name, p in engine.module.named_parameters()}


def whole_states(engine: Engine) -> dict[str, torch.Tensor]:
    """`<parameter index>.<state>` -> gathered state, through the public state_dict. A collective."""
    state = engine.optimizer.state_dict()["state"]
    return {f"{index}.{name}": whole(t) for index, entry in state.items() for name, t in entry.items()}


def train_job(folder: Path, setup: Setup, steps: Sequence[Rows]) -> Trajectory | None:
    """Trains on every rank; rank 0 returns what happened."""
    engine = build(folder, setup)
    results = [take_step(engine, rows, setup.accumulation) for rows in steps]
    weights = whole_weights(engine)
    engine.optimizer.close()
    if dist.get_rank() != 0:
        return None
    return Trajectory([r.loss for r in results], [r.grad_norm for r in results], weights)


def losses_job(folder: Path, setup: Setup, steps: Sequence[Rows], num_steps: int) -> list[float]:
    """Losses over the same few batches again and again."""
    engine = build(folder, setup)
    losses = [take_step(engine, steps[step % len(steps)]).loss for step in range(num_steps)]
    engine.optimizer.close()
    return losses
