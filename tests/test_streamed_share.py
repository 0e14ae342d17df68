"""A share of streamed states that is less than any group streams nothing, and every way to train says so, once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_configs import write_config
from hypothesis import given
from hypothesis import strategies as st
from parity_api.small import warnings_of
from plans import ShapePlanner, llama_8b
from ranks.pool import run_on_ranks
from torch import nn
from typer.testing import CliRunner

from heavylift.cli.main import app
from heavylift.config.schema import DataConfig, EngineConfig, ModelConfig, Recipe, Tier, TrainConfig
from heavylift.memory.activations import LayerShape
from heavylift.offload.options import TieredOptions
from heavylift.offload.tiers import choose_streamed, least_streamed_share
from heavylift.ranks import Ranks

SMALL = ShapePlanner(LayerShape(4, 64, 64, 64, 128, 4, 100), 50_000, 1)
NOTHING = r"streamed_share: without effect, as (\S+) of the host's states is less than any group of them; from (\S+) on"


@given(st.lists(st.integers(0, 10**6), max_size=12))
def test_the_least_share_is_the_least(numels: list[int]) -> None:
    least = least_streamed_share(numels)
    assert any(choose_streamed(numels, min(1.0, least * (1 + 1e-9)))) == any(numels)
    assert not any(choose_streamed(numels, least * (1 - 1e-9)))


def options(share: float, ratio: float = 1.0) -> TieredOptions:
    return TieredOptions(tier=Tier.HOST, ratio=ratio, streamed_share=share)


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_the_plan_names_a_share_that_streams(ratio: float) -> None:
    plan = llama_8b(8).plan(options(0.001, ratio), None)
    assert plan.slot_bytes == 0
    (line,) = plan.without_effect
    found = re.match(NOTHING, line)
    assert found is not None and float(found[1]) == 0.001, line
    there = llama_8b(8).plan(options(float(found[2]), ratio), None)
    assert there.slot_bytes > 0 and there.without_effect == ()
    # that is told where the options are: nothing is on the host
    assert llama_8b(8).plan(options(0.001, 0.0), None).without_effect == ()
    assert llama_8b(8).plan(options(0.0, ratio), None).without_effect == ()


def recipe_job(share: float) -> list[str]:
    """What the start of a run says."""
    from heavylift.train.setup import place_states

    recipe = Recipe(
        model=ModelConfig(model_name_or_path="m"),
        data=DataConfig(dataset="d"),
        train=TrainConfig(output_dir="o"),
        engine=EngineConfig(offload_optimizer=Tier.HOST, streamed_share=share),
    )
    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
    planner: Any = SMALL
    return warnings_of(lambda: place_states(planner, options(share), None, recipe, ranks))  # type: ignore[arg-type]


def test_a_run_says_so() -> None:
    ((line,),) = run_on_ranks(1, recipe_job, 0.001)
    assert re.match(rf"engine\.{NOTHING}", line), line
    assert run_on_ranks(1, recipe_job, 0.5) == [[]]


def script_job(own: dict[str, Any], accumulation: int) -> list[str]:
    """What initialize() says."""
    import heavylift

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "heavylift": own,
    }
    return warnings_of(lambda: heavylift.initialize(model=nn.Linear(64, 64), config=config)[0].destroy())


def test_a_script_is_told() -> None:
    said, silent = run_on_ranks(2, script_job, {"streamed_share": 0.001}, 1)
    assert len(said) == 1 and re.match(rf"heavylift\.{NOTHING}", said[0]) and silent == []
    assert run_on_ranks(2, script_job, {"streamed_share": 1.0}, 1) == [[], []]
    said, silent = run_on_ranks(2, script_job, {"gradients_on": "device"}, 2)
    assert said == ["heavylift.gradients_on: without effect, as gradients are added up on the host"] and silent == []


def test_explain_tells_it_with_the_plan(tmp_path: Path, tiny_llama_dir: Path) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    said = {}
    for share in (0.001, 1.0):
        path = write_config(tmp_path, config | {"heavylift": {"streamed_share": share}})
        done = CliRunner().invoke(app, ["config", "explain", str(path), "--model", str(tiny_llama_dir)])
        assert done.exit_code == 0, done.output
        said[share] = " ".join(done.output.split())
    assert re.search(rf"heavylift\.{NOTHING}", said[0.001])
    assert "without effect" not in said[1.0] and "slots of streamed states" in said[1.0]


def test_the_banner_speaks_of_streaming_only_where_something_is_streamed() -> None:
    from heavylift.train.loop import _states

    for share, said in ((0.001, False), (0.5, True)):
        assert ("50% of the host's streamed" in _states(options(share), SMALL.plan(options(share), None))) == said
