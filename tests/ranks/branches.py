"""A model whose parts are not all used in every step, as experts and auxiliary heads are."""

from __future__ import annotations

import torch
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.engine import build_optimizer
from heavylift.offload.groups import local_tensor
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model
from ranks.schedules import Tensors, slow_down

PLAN = [((0, 1, 2), True), ((0, 2), False), ((1,), True), ((0, 1, 2), False), ((2,), True), ((0, 1), True)]
"""Of each step: the layers that are used, and whether the parts are that are used only sometimes."""


class Layer(nn.Module):
    """One part that is used whenever the layer is, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        """x: [rows, 6]."""
        x = self.always(x)
        return self.sometimes(x) if both else x


class Branches(nn.Module):
    """Three layers, of which each step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, used: tuple[int, ...], both: bool) -> torch.Tensor:
        """x: [rows, 6]."""
        for index in used:
            x = self.layers[index](x, both).tanh()
        return x * self.scale


def branches_job(schedule: str, accumulate: bool) -> Tensors:
    """This rank's shards and states after the steps of `PLAN`, with a slow worker."""
    torch.manual_seed(0)
    model = Branches()
    sharded = shard_model(model, 3, make_mesh(3, "cpu"))
    options = TieredOptions(
        Tier.HOST,
        ratio=0.9,
        schedule=Schedule(schedule),
        max_grad_norm=0.0 if schedule == "immediate" else 1e6,
        accumulate=accumulate,
    )
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    optimizer = build_optimizer(sharded, groups, options, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    slow_down(optimizer, 0.003)
    for used, both in PLAN:
        for _ in range(1 + accumulate):
            model(torch.randn(4, 6), used, both).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    tensors = {f"{i}.{n}": local_tensor(t).clone() for i, entry in state.items() for n, t in entry.items()}
    tensors |= {name: local_tensor(p).clone() for name, p in model.named_parameters()}
    optimizer.close()
    return tensors
