"""Modules that are gathered as a whole: flagged by class, name and suffix, and what the groups then are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.api import leaf_modules
from heavylift.errors import UserError


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[int(x.sum() > 0)](x)  # which one, the data says


def model_of_blocks() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    return model


def test_leaf_modules_are_set_by_class_name_and_suffix() -> None:
    model = model_of_blocks()
    assert leaf_modules.get_z3_leaf_modules(model) == []
    assert len(leaf_modules.set_z3_leaf_modules(model, [Block])) == 3
    assert len(leaf_modules.set_z3_leaf_modules(model, ["Expert"])) == 6
    assert len(leaf_modules.get_z3_leaf_modules(model)) == 9
    assert leaf_modules.leaf_modules_of(model) == list(model.blocks)  # the outermost
    assert len(leaf_modules.unset_z3_leaf_modules(model, [Block, f"{__name__}.Expert"])) == 9
    found, missing = leaf_modules.set_z3_leaf_modules_by_name(model, ["blocks.1", "x"], raise_if_not_found=False)
    assert (found, missing) == ([model.blocks[1]], ["x"]) and leaf_modules.z3_leaf_module(model.blocks[1])
    found, missing = leaf_modules.set_z3_leaf_modules_by_suffix(model, ["experts"])
    assert len(found) == 3 and missing == []
    for wrong in (
        lambda: leaf_modules.set_z3_leaf_modules(model, ["Absent"]),
        lambda: leaf_modules.set_z3_leaf_modules(model, [3]),  # type: ignore[list-item]
        lambda: leaf_modules.set_z3_leaf_modules_by_name(model, ["x"]),
        lambda: leaf_modules.set_z3_leaf_modules_by_suffix(model, ["x"]),
    ):
        with pytest.raises(UserError):
            wrong()


def test_groups_do_not_split_a_leaf() -> None:
    model = model_of_blocks()
    experts = [e for block in model.blocks for e in block.experts]
    assert leaf_modules.keep_leaves_whole(model, experts) == experts
    assert leaf_modules.keep_leaves_whole(model, None) is None
    leaf_modules.set_z3_leaf_modules(model, [Block])
    assert leaf_modules.keep_leaves_whole(model, experts) == list(model.blocks)
    assert leaf_modules.keep_leaves_whole(model, None) == list(model.blocks)


class Mixture(nn.Module):
    _no_split_modules = ("Expert",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def leaf_job(is_leaf: bool) -> list[str]:
    """Names of the groups. With leaves it trains though each rank takes other experts."""
    model = Mixture()
    if is_leaf:
        leaf_modules.set_z3_leaf_modules(model, ["Block"])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = heavylift.initialize(model=model, config=config)
    names = [group.name for group in engine._sharded.groups]
    if is_leaf:
        sign = 1.0 if dist.get_rank() == 0 else -1.0
        for _ in range(2):
            engine.backward(engine(torch.full((2, 4), sign)).square().mean())
            engine.step()
    with heavylift.zero.unwrap_model_for_generation(engine) as unwrapped:
        assert unwrapped is model
        unwrapped.eval()(torch.ones(2, 4))
    engine.destroy()
    return names


def test_a_mixture_with_leaves_trains_with_other_experts_on_each_rank() -> None:
    assert run_on_ranks(2, leaf_job, True) == [["root", "blocks.0", "blocks.1", "blocks.2"]] * 2
    assert len(run_on_ranks(2, leaf_job, False)[0]) == 7
