"""A router that its family keeps in float32 stays so where it is frozen, beside layers in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.families import VOCAB, save_family
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step
from safetensors.torch import load_file

from heavylift.offload.groups import local_tensor

STEPS = make_steps(2, VOCAB)
ROUTER = "model.layers.1.mlp.gate.weight"


def frozen_job(folder: Path) -> tuple[list[float], torch.Tensor]:
    """Losses, and this rank's shard of the router afterwards."""
    engine = build(folder, Setup(dtype=torch.bfloat16, freeze=("*.mlp.gate.weight",)))
    losses = [take_step(engine, rows).loss for rows in STEPS * 2]
    engine.optimizer.close()
    return losses, local_tensor(engine.module.get_parameter(ROUTER)).clone()


def test_a_frozen_router_keeps_its_bits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_family("deepseek_v3", tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    results = run_on_ranks(2, frozen_job, folder)
    losses = results[0][0]
    assert losses[2] < losses[0] and losses[3] < losses[1]
    assert losses[0] == pytest.approx(torch.tensor(VOCAB).log().item(), rel=0.2)
    router = torch.cat([shard for _, shard in results])
    stored = load_file(folder / "model.safetensors")[ROUTER]
    # older versions of transformers round it too
    assert router.dtype == loaded.get_parameter(ROUTER).dtype
    assert torch.equal(router, stored.to(router.dtype))
