"""Configurations as people post them, each trained for three steps on two ranks beside a plain torch loop; and those
that ask for what is not there, refused by `initialize` with the reason.

The files are taken as they are: their batch sizes have a solution on two ranks, "auto" gets what a trainer fills in.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_configs import all_config_files, refused_config_files, trainer_defaults
from parity_api.models import VOCAB, make_llama
from ranks.pool import run_on_ranks
from test_ds_config_real import REFUSED
from torch import nn

import heavylift
from heavylift.api.lr_schedules import make_scheduler
from heavylift.config.deepspeed.parse import load_settings
from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.errors import UserError

NUM_RANKS, NUM_STEPS, LENGTH = 2, 3, 6
DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
LR = 1e-2
"""Of the script's own optimizer, where the file has none."""
CLOSE = {Precision.FP32: 1e-5, Precision.BF16: 2e-3, Precision.FP16: 5e-4}
"""Relative, of the losses of steps 2 and 3: gradients are added up in another order, and weights then round elsewhere.
The first losses are equal to the bit."""


@dataclass(frozen=True)
class Curve:
    """What three steps did."""

    losses: list[list[float]]
    """Step -> micro-batch."""
    lrs: list[float]
    moved: list[bool]
    """Step -> whether any trained weight has another value after it."""


def settings_of(path: Path) -> Settings:
    return load_settings(path, NUM_RANKS, defaults=trainer_defaults(path))


def make_model(path: Path) -> nn.Module:
    """A tiny Llama; where the file names the experts of a Mixtral, a tiny one of those."""
    if path.stem != "moe_leaf_cosine":
        return make_llama()
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(6)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def make_batches(settings: Settings) -> list[list[torch.Tensor]]:
    """Step -> micro-batch of all ranks -> token ids, int64 [micro_batch, LENGTH]. Micro-batch i is rank i % ranks's."""
    generator = torch.Generator().manual_seed(7)
    batch = settings.batch
    steps = [torch.randint(0, VOCAB, (batch.train_batch, LENGTH), generator=generator) for _ in range(NUM_STEPS)]
    return [list(ids.split(batch.micro_batch)) for ids in steps]


def client_optimizer(settings: Settings, params: Any) -> torch.optim.Optimizer | None:
    return None if settings.optimizer is not None else torch.optim.AdamW(params, lr=LR, foreach=False)


# ---- heavylift -------------------------------------------------------------------------------------------------------


def engine_curve(path: Path, settings: Settings, model: nn.Module) -> Curve:
    """This rank's micro-batches."""
    optimizer = client_optimizer(settings, model.parameters())
    engine, *_ = heavylift.initialize(model=model, optimizer=optimizer, config=settings)
    losses, lrs, moved = [], [], []
    before = whole_weights(engine)
    for batches in make_batches(settings):
        lrs.append(engine.get_lr()[0])
        of_step = []
        for ids in batches[dist.get_rank() :: NUM_RANKS]:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            of_step.append(loss.item())
        losses.append(of_step)
        assert engine.was_step_applied()
        after = whole_weights(engine)
        moved.append(any(not torch.equal(after[name], before[name]) for name in after))
        before = after
    assert (engine.global_steps, engine.skipped_steps) == (NUM_STEPS, 0)
    engine.destroy()
    return Curve(losses, lrs, moved)


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """A collective."""
    with heavylift.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


# ---- plain torch -----------------------------------------------------------------------------------------------------


def plain_optimizer(settings: Settings, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    block = settings.optimizer
    if block is None:
        optimizer = client_optimizer(settings, params)
        assert optimizer is not None
        return optimizer
    if block.name == "SGD":
        return torch.optim.SGD(params, foreach=False, **block.more)
    assert block.name in ("adam", "adamw") and block.decoupled, block
    return torch.optim.AdamW(
        params, lr=block.lr, betas=block.betas, eps=block.eps, weight_decay=block.weight_decay, foreach=False
    )


def plain_curve(settings: Settings, masters: nn.Module) -> Curve:
    """All micro-batches on one process: float32 masters behind parameters of the file's precision."""
    dtype = DTYPES[settings.precision]
    working = copy.deepcopy(masters)
    for param in working.parameters():
        param.data = param.data.to(dtype)
    pairs = list(zip(working.parameters(), masters.parameters(), strict=True))
    optimizer = plain_optimizer(settings, [master for _, master in pairs])
    scheduler = None if settings.scheduler is None else make_scheduler(settings.scheduler, optimizer)
    scale_of = settings.loss_scale
    scale = 1.0 if scale_of is None else (scale_of.static_scale or scale_of.initial_scale)
    cast = settings.autocast is not None
    losses, lrs = [], []
    for batches in make_batches(settings):
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        of_step = []
        for ids in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss = working(input_ids=ids, labels=ids).loss
            (loss.float() * (scale / len(batches))).backward()
            of_step.append(loss.item())
            for param, master in pairs:
                if param.grad is not None:
                    grad = param.grad.float() / scale
                    master.grad = grad if master.grad is None else master.grad + grad
                    param.grad = None
        if settings.gradient_clipping > 0:
            nn.utils.clip_grad_norm_(masters.parameters(), settings.gradient_clipping, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for param, master in pairs:
                param.copy_(master)
        losses.append(of_step)
    return Curve(losses, lrs, [])


# ---- side by side ----------------------------------------------------------------------------------------------------


def both(path: Path, folder: Path) -> tuple[Curve, Curve | None]:
    """(this rank's curve, on rank 0 the plain one). In `folder`, for files that write curves to relative paths."""
    home = Path.cwd()
    os.chdir(folder)
    try:
        settings = settings_of(path)
        plain = plain_curve(settings, make_model(path)) if dist.get_rank() == 0 else None
        return engine_curve(path, settings, make_model(path)), plain
    finally:
        os.chdir(home)


@pytest.mark.parametrize("path", all_config_files(), ids=lambda path: path.stem)
def test_three_steps(path: Path, tmp_path: Path) -> None:
    (first, plain), (second, _) = run_on_ranks(NUM_RANKS, both, path, tmp_path)
    assert plain is not None
    settings = settings_of(path)
    assert first.lrs == second.lrs == plain.lrs
    # weights move in the steps that have a rate, and stay in those of a warm-up that have none
    assert first.moved == second.moved == [lr > 0 for lr in plain.lrs]
    for step in range(NUM_STEPS):
        expected = torch.tensor(plain.losses[step], dtype=torch.float64)
        got = torch.empty_like(expected)
        got[0::NUM_RANKS] = torch.tensor(first.losses[step], dtype=torch.float64)
        got[1::NUM_RANKS] = torch.tensor(second.losses[step], dtype=torch.float64)
        assert torch.isfinite(got).all()
        if step == 0:
            assert torch.equal(got, expected)
        else:
            assert torch.allclose(got, expected, rtol=CLOSE[settings.precision], atol=0), (step, got - expected)


def test_files_that_write_curves_write_them(tmp_path: Path) -> None:
    path = next(path for path in all_config_files() if path.stem == "monitored")
    run_on_ranks(NUM_RANKS, both, path, tmp_path)
    assert list(tmp_path.glob("logs/**/events.out.tfevents.*"))
    assert list(tmp_path.glob("logs/**/*.csv"))


@pytest.mark.parametrize("path", refused_config_files(), ids=lambda path: path.stem)
def test_refused(path: Path) -> None:
    with pytest.raises(UserError) as caught:
        heavylift.initialize(model=nn.Linear(2, 2), config=str(path))
    for key in REFUSED[path.stem]:
        assert [line for line in caught.value.problems if f" {key}: " in line], (key, caught.value.problems)
    assert not dist.is_initialized()
