"""Layers of many families on a CUDA device, compiled, beside the plain loop on the CPU. Run with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks.families import FAMILIES, VOCAB, save_family
from ranks.plain import make_steps, plain_train
from ranks.sharded import Setup, param_groups, take_step

from heavylift.config.schema import ModelConfig, Schedule, Tier, TrainConfig
from heavylift.engine import Engine, build_optimizer
from heavylift.models.load import build_on_meta, load_hf_config, load_weights, materialise
from heavylift.models.loss_head import install_loss_head
from heavylift.models.stored import check_weights
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model
from heavylift.train.setup import prepare_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = make_steps(2, VOCAB)
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
SETUP = Setup(lr=1e-3, weight_decay=0.0)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """The first GPU, in a process group of one."""
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_train_as_the_plain_loop(
    family: str, dtype: str, device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `heavylift train` prepares them: recomputed in backward, compiled where that can be, in bfloat16 all of them.

    The plain loop is in float32.
    """
    from transformers import AutoModelForCausalLM

    folder = save_family(family, tmp_path / "model")
    plain_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    plain = plain_train(plain_model, param_groups(plain_model, SETUP), STEPS, SETUP.lr, clip=0.0)

    torch._dynamo.reset()
    config = ModelConfig(model_name_or_path=str(folder))
    model = build_on_meta(load_hf_config(folder, False), config, getattr(torch, dtype))
    stored = check_weights(model, folder)
    install_loss_head(model, "auto")
    checkpointing = getattr(model, "supports_gradient_checkpointing", False)
    prepare_layers(model, TrainConfig(output_dir="unused", gradient_checkpointing=checkpointing), device)
    sharded = shard_model(model, 3, make_mesh(3, "cuda"))
    materialise(model, device)
    load_weights(model, folder, stored)
    options = TieredOptions(tier=Tier.HOST, schedule=Schedule.DEFERRED, num_threads=2)
    groups = param_groups(model, SETUP)
    optimizer = build_optimizer(sharded, groups, options, lr=SETUP.lr, betas=(0.9, 0.999), eps=1e-8)
    engine = Engine(sharded, optimizer, device)
    results = [take_step(engine, rows) for rows in STEPS]
    optimizer.close()
    tolerance = TOLERANCE[dtype]
    assert [r.loss for r in results] == pytest.approx(plain.losses, rel=tolerance)
    assert [r.grad_norm for r in results] == pytest.approx(plain.norms, rel=10 * tolerance)
    if dtype == "bfloat16":
        assert "cannot be compiled" not in caplog.text
