"""Gradients of several micro-batches add up in float32, from before FSDP2 rounds them to the parameters' dtype."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import Rows, loss_sum, make_steps, micro_batches
from ranks.pool import run_on_ranks
from ranks.sharded import BETAS, Setup, build, take_step, train_job, whole_states
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.engine import build_optimizer
from heavylift.offload.gradients import GradientAccumulation
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model

ROWS = make_steps(1, VOCAB)[0]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


def gradient_job(folder: Path, setup: Setup, rows: Rows) -> Tensors | None:
    """The gradient that the optimizer saw in its first step: without clipping exp_avg is (1 - beta1) times it."""
    engine = build(folder, setup)
    take_step(engine, rows, setup.accumulation)
    states = whole_states(engine)
    names = [name for name, _ in engine.module.named_parameters()]
    if dist.get_rank() != 0:
        return None
    return {name: states[f"{i}.exp_avg"].double() / (1 - BETAS[0]) for i, name in enumerate(names)}


def gradients(folder: Path, world: int, accumulation: int) -> list[Tensors]:
    """bfloat16 gradients of every micro-batch of every rank, from the plain model: [accumulation * world], float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    for index in range(accumulation):
        for rank in range(world):
            batch = micro_batches(ROWS, rank, world, accumulation)[index]
            (loss_sum(model, batch) / ROWS.num_trained).backward()
            found.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
    return found


def rounded_sum(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """One after the other, each sum rounded to `dtype`."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = (total + tensor).to(dtype).double()
    return total


def error(found: Tensors, true: Tensors) -> float:
    """Relative distance over all parameters."""
    apart = sum(float((found[n] - true[n]).square().sum()) for n in true)
    return (apart / sum(float(t.square().sum()) for t in true.values())) ** 0.5


@pytest.mark.parametrize(
    "setup",
    [Setup(stage=3), Setup(stage=2, ratio=0.37), Setup(stage=1), Setup(stage=0, tier="device"), Setup(tier="device")],
    ids=["stage3-host", "stage2-part", "stage1-host", "stage0-device", "stage3-device"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_bfloat16_gradients_add_up_in_float32(world: int, setup: Setup, odd_llama: Path) -> None:
    accumulation = 4
    setup = replace(setup, dtype=torch.bfloat16, accumulation=accumulation)
    found = run_on_ranks(world, gradient_job, odd_llama, setup, ROWS)[0]
    parts = gradients(odd_llama, world, accumulation)
    true = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    in_bfloat16 = {name: rounded_sum([part[name] for part in parts], torch.bfloat16) for name in parts[0]}
    # what adding up FSDP2's own (rounded) results in float32 would give
    steps = [parts[i * world : (i + 1) * world] for i in range(accumulation)]
    rounded_late = {
        name: sum(torch.stack([part[name] for part in step]).sum(0).bfloat16().double() for step in steps)
        for name in true
    }
    assert error(found, true) < 1e-6  # float32: seen 6e-8
    assert error(in_bfloat16, true) > 1e-3
    if world > 1:
        assert error(rounded_late, true) > 1e-3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_and_ranks_are_interchangeable(stage: int, odd_llama: Path) -> None:
    """1 rank x 4 micro-batches, 2 x 2 and 2 x 1 are one step; float32 sums in another order (relative 1e-7) differ."""
    runs = [
        run_on_ranks(world, train_job, odd_llama, Setup(stage=stage, accumulation=accumulation), make_steps(3, VOCAB))[
            0
        ]
        for world, accumulation in ((1, 4), (2, 2), (2, 1))
    ]
    for other in runs[1:]:
        assert other.losses == pytest.approx(runs[0].losses, rel=2e-6)
        for name, weight in runs[0].weights.items():
            assert float((other.weights[name] - weight).abs().max()) < 2e-5, name


def test_nothing_is_left_over_for_the_next_step(odd_llama: Path) -> None:
    """The second step's gradient is that of a fresh optimizer: moments after lr 0 steps are a plain recursion."""
    setup = Setup(accumulation=4, lr=0.0, weight_decay=0.0, ratio=0.6)
    first = run_on_ranks(2, gradient_job, odd_llama, setup, ROWS)[0]
    twice = run_on_ranks(2, two_steps_job, odd_llama, setup, ROWS)[0]
    for name, gradient in first.items():
        torch.testing.assert_close(twice[name], gradient * (1 - BETAS[0] ** 2), rtol=1e-5, atol=1e-9)


def two_steps_job(folder: Path, setup: Setup, rows: Rows) -> Tensors:
    """exp_avg after the same step twice."""
    engine = build(folder, setup)
    for _ in range(2):
        take_step(engine, rows, setup.accumulation)
    states = whole_states(engine)
    names = [name for name, _ in engine.module.named_parameters()]
    return {name: states[f"{i}.exp_avg"].double() for i, name in enumerate(names)}


class Ending(nn.Module):
    """Two layers, of which the last is used when the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x) if all_of_it else x


def buffers_job(stage: int, tier: str, schedule: str) -> list[int]:
    """How many of FSDP2's float32 buffers live on after each backward."""
    buffers: list[weakref.ref[torch.Tensor]] = []
    on_reduced = GradientAccumulation._on_reduced

    def watched(self: GradientAccumulation, group: Any, flat: torch.Tensor) -> None:
        buffers.append(weakref.ref(flat))
        on_reduced(self, group, flat)

    model = Ending().bfloat16()
    sharded = shard_model(model, stage, make_mesh(stage, "cpu"))
    options = TieredOptions(Tier(tier), ratio=0.7, schedule=Schedule(schedule), accumulate=True)
    with patch.object(GradientAccumulation, "_on_reduced", watched):
        params = [{"params": list(model.parameters())}]
        optimizer = build_optimizer(sharded, params, options, lr=1e-2, betas=BETAS, eps=1e-8)
    alive = []
    for all_of_it in (True, False):
        model(torch.randn(4, 5).bfloat16(), all_of_it).float().square().mean().backward()
        optimizer._accumulation.settle()
        alive.append(sum(ref() is not None for ref in buffers))
    assert len(buffers) == 2
    optimizer.close()
    return alive


@pytest.mark.parametrize(
    ("stage", "tier", "schedule"), [(3, "host", "deferred"), (2, "host", "synchronous"), (2, "device", "synchronous")]
)
def test_no_float32_buffer_outlives_its_backward(stage: int, tier: str, schedule: str) -> None:
    assert run_on_ranks(2, buffers_job, stage, tier, schedule) == [[0, 0]] * 2
