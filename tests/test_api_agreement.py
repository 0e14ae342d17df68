"""Ranks that bring different things to `initialize` are told so, all of them, before tensors are exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.models import make_branches
from parity_api.runs import Case, ds_config
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.errors import UserError


def other_model(kind: str) -> nn.Module:
    """What rank 1 has."""
    model = make_branches()
    if kind == "shape":
        model.left = nn.Linear(model.left.in_features + 1, model.left.out_features)
    if kind == "dtype":
        model.left.weight.data = model.left.weight.data.double()
    if kind == "frozen":
        model.left.weight.requires_grad_(False)
    if kind == "more":
        model.head_of_rank_1 = nn.Linear(2, 2)
    if kind == "buffer":
        model.register_buffer("frequencies", torch.zeros(77))
    if kind == "order":
        left = model._modules.pop("left")
        model._modules["left"] = left
    return model


def differing_job(kinds: list[str]) -> dict[str, list[str]]:
    """Rank 1 differs in one thing at a time."""
    found = {}
    for kind in kinds:
        mine = kind if dist.get_rank() == 1 else ""
        model = other_model(mine)
        config = ds_config(Case("branches", 3 if mine == "stage" else 2, "cpu", "bf16"), 2)
        if mine == "lr":
            config["optimizer"]["params"]["lr"] = 0.5
        if mine == "clipping":
            config["gradient_clipping"] = 0.125
        if mine == "streamed":
            config["heavylift"] = {"streamed_share": 0.5}
        if mine == "format":
            config["heavylift"] = {"state_format": "split"}
        groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        if mine == "groups":
            groups = [{"params": groups[0]["params"][:1]}, {"params": groups[0]["params"][1:]}]
        if mine == "decay":
            groups[0]["weight_decay"] = 0.25
        with pytest.raises(UserError) as raised:
            heavylift.initialize(model=model, model_parameters=groups, config=config)
        found[kind] = list(raised.value.problems)
    return found


EXPECTED = {
    "shape": ("model: parameter left.weight: ", "build the same model on every rank"),
    "dtype": ("float64 on rank 1", "build the same model on every rank"),
    "frozen": ("frozen on rank 1", "build the same model on every rank"),
    "more": ("model: parameter head_of_rank_1.weight: absent on rank 0, (2, 2) float32 on rank 1", "same model"),
    "buffer": ("model: buffer frequencies: ", "(77,) float32 on rank 1"),
    "order": ("model: parameters have another order on rank 1 than on rank 0", "same model"),
    "stage": ("initialize: zero_optimization.stage: 2 on rank 0, 3 on rank 1", "the same configuration"),
    "lr": ("optimizer.lr: 0.01 on rank 0, 0.5 on rank 1", "the same configuration"),
    "streamed": ("initialize: heavylift.streamed_share: 0.0 on rank 0, 0.5 on rank 1", "the same configuration"),
    "format": ("heavylift.state_format (or bf16.bf16_optimizer_states): fp32 on rank 0, split on", "the same conf"),
    "clipping": ("initialize: gradient_clipping: 0.5 on rank 0, 0.125 on rank 1", "the same configuration"),
    "groups": ("parameters of group 1: absent on rank 0", "group the parameters alike"),
    "decay": ("'weight_decay': 0.25", "group the parameters alike"),
}


def test_ranks_that_differ_are_named_on_every_rank() -> None:
    first, second = run_on_ranks(2, differing_job, list(EXPECTED))
    assert first == second
    for kind, (start, end) in EXPECTED.items():
        said = "\n".join(first[kind])
        assert start in said and end in said, (kind, said)
        assert len(first[kind]) <= 3, kind


def free_job() -> float:
    """What only reports may differ, and so may values: rank 0's are taken."""
    model = make_branches()
    config = ds_config(Case("branches", 2, "cpu", "bf16"), 2)
    if dist.get_rank() == 1:
        config |= {"steps_per_print": 7}
        with torch.no_grad():
            model.left.weight.fill_(3.0)
    engine, *_ = heavylift.initialize(model=model, config=config)
    found = engine.module.left.weight.full_tensor().float().sum().item()
    engine.destroy()
    return found


def test_values_and_reports_may_differ() -> None:
    expected = make_branches().left.weight.bfloat16().float().sum().item()
    assert run_on_ranks(2, free_job) == [expected, expected]
