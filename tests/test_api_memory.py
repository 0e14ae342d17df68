"""What initialize() takes: the user's whole model is gone when the optimizer's states are allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.runs import Case, ds_config
from ranks.memory import Growth, measure
from ranks.pool import run_on_fresh_ranks
from torch import nn

import heavylift

MIB = 2**20
NUM_LAYERS, WIDTH = 8, 1448
LAYER_BYTES = WIDTH * WIDTH * 4
MODEL_BYTES = NUM_LAYERS * LAYER_BYTES


class Stack(nn.Module):
    """64 MiB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class LayeredStack(Stack):
    """The same, gathered layer by layer."""

    _no_split_modules = ("Linear",)


def initialize_job(layered: bool) -> Growth:
    model = LayeredStack() if layered else Stack()
    params = list(model.parameters())  # a script holds on to them
    config = ds_config(Case("", 3, "none", "bf16"), dist.get_world_size())
    # what importing and the first collectives take is nobody's model
    heavylift.initialize(model=nn.Linear(8, 8), config=config)[0].destroy()
    engine: Any = None

    def action() -> None:
        nonlocal engine
        engine = heavylift.initialize(model=model, model_parameters=params, config=config)[0]

    growth = measure(action)
    engine.backward(engine(torch.ones(8, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    return Growth(growth.peak, growth.kept, None)


@pytest.mark.parametrize("layered", [False, True])
def test_the_whole_model_is_let_go_of_before_the_states_are_allocated(layered: bool) -> None:
    shard = MODEL_BYTES // 2 // 2  # bfloat16, of two ranks
    states = 3 * MODEL_BYTES // 2
    masters = MODEL_BYTES // 2  # the float32 values from before the rounding, until they are in the states
    for growth in run_on_fresh_ranks(2, initialize_job, layered):
        assert growth.kept < shard + states - MODEL_BYTES + 12 * MIB
        # the bound would be MODEL_BYTES higher if the whole model were kept meanwhile
        assert growth.peak < shard + states + masters - MODEL_BYTES + 2 * LAYER_BYTES + 12 * MIB
        assert growth.kept > states - MODEL_BYTES
