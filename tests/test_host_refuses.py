"""Memory that the plan found free and the host refuses (here: a limit of the address space) is one line to read."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from ranks.memory import status_bytes
from ranks.pool import run_on_fresh_ranks
from torch import nn

import heavylift
from heavylift.api.optimizers import DeepSpeedCPUAdam
from heavylift.config.schema import Tier, TrainConfig
from heavylift.errors import UserError
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model
from heavylift.train.setup import make_optimizer

MIB = 2**20
SIDE = 4096
"""A square float32 weight of this side takes 64 MiB, its states 192."""
ROOM = 160 * MIB


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """The process may map so many bytes more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refusals_job() -> list[str]:
    """What a recipe's setup, initialize() and DeepSpeedCPUAdam say with room for anything but the states."""
    messages = []
    sharded = shard_model(nn.Linear(SIDE, SIDE, bias=False), 2, make_mesh(2, "cpu"))
    with pytest.raises(UserError) as raised, room_for(ROOM):
        make_optimizer(sharded, TrainConfig(output_dir="out"), TieredOptions(Tier.HOST))
    messages.append(str(raised.value))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    heavylift.initialize(model=nn.Linear(2, 2), config=config)[0].destroy()  # what is imported late takes room too
    model = nn.Linear(SIDE, SIDE, bias=False)
    with pytest.raises(UserError) as raised, room_for(ROOM):
        heavylift.initialize(model=model, config=config)
    messages.append(str(raised.value))
    param = nn.Parameter(torch.zeros(SIDE, SIDE))
    param.grad = torch.ones(SIDE, SIDE)
    optimizer = DeepSpeedCPUAdam([param])
    with pytest.raises(UserError) as raised, room_for(ROOM):
        optimizer.step()
    messages.append(str(raised.value))
    return messages


def test_states_that_the_host_refuses() -> None:
    for message, key, instead in zip(
        run_on_fresh_ranks(1, refusals_job)[0],
        ("engine.offload_optimizer", "zero_optimization.offload_optimizer", "DeepSpeedCPUAdam"),
        ("lower engine.ratio", "lower its `ratio`", "use FusedAdam or a smaller model"),
        strict=True,
    ):
        assert message.startswith(
            f"{key}: host memory for the optimizer states: the host refused a mapping of 0.19 GiB"
        )
        assert instead in message and "\n" not in message
