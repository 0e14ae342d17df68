"""Parameters that a model keeps in float32: told before anything is allocated, and trained around when frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.families import VOCAB, save_family
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step

from heavylift.errors import UserError

STEPS = make_steps(2, VOCAB)
FROZEN = ("*.mlp.gate.weight",)


def check_job(folder: Path) -> list[str]:
    from heavylift.config.schema import ModelConfig
    from heavylift.models.load import build_on_meta, load_hf_config
    from heavylift.sharding import make_mesh, shard_model
    from heavylift.train.setup import check_one_dtype

    said = []
    for freeze in ((), FROZEN):
        config = ModelConfig(model_name_or_path=str(folder), freeze=freeze)
        model = build_on_meta(load_hf_config(folder, False), config, torch.bfloat16)
        try:
            check_one_dtype(shard_model(model, 3, make_mesh(3, "cpu")))
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def frozen_job(folder: Path) -> list[float]:
    engine = build(folder, Setup(dtype=torch.bfloat16, freeze=FROZEN))
    losses = [take_step(engine, rows).loss for rows in STEPS * 2]
    engine.optimizer.close()
    return losses


def test_a_router_in_float32_is_told_and_can_be_frozen(tmp_path: Path) -> None:
    folder = save_family("deepseek_v3", tmp_path / "model")
    refused, frozen = run_on_ranks(2, check_job, folder)[0]
    assert refused.startswith("model.dtype: this model keeps model.layers.1.mlp.gate.weight in float32")
    assert frozen == ""
    losses = run_on_ranks(2, frozen_job, folder)[0]
    assert losses[2] < losses[0] and losses[3] < losses[1]
    assert losses[0] == pytest.approx(torch.tensor(VOCAB).log().item(), rel=0.2)
