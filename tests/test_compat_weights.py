"""Float32 weights out of a training checkpoint: files, limits, shared and frozen weights, wrong folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.errors import UserError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.register_buffer("table", torch.arange(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(ids)))) + self.frozen.sum()


def checkpoint_job(folder: Path) -> dict[str, torch.Tensor]:
    """Trains in bfloat16 and saves; the float32 values as `safe_get_full_fp32_param` has them."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = heavylift.initialize(model=Tied(), config=config)
    for _ in range(3):
        engine.backward(engine(torch.arange(4)).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder)
    params = dict(engine.module.named_parameters())
    result = {n: heavylift.utils.safe_get_full_fp32_param(p) for n, p in params.items() if p.requires_grad}
    engine.destroy()
    return result


def test_float32_weights_out_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    from heavylift.api import zero_to_fp32

    expected, other = run_on_ranks(2, checkpoint_job, tmp_path / "ck")
    assert all(torch.equal(expected[n], other[n]) for n in expected)
    state_dict = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck")
    assert state_dict.keys() == {*expected, "frozen", "table"}
    assert all(torch.equal(state_dict[name], expected[name]) for name in expected)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in expected.values())  # more than bfloat16 shows
    assert state_dict["frozen"].dtype == torch.float32 and state_dict["table"].dtype == torch.int64
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), tmp_path / "ck")
    assert torch.equal(model.head.weight, expected["embed.weight"]) and model.head.weight is model.embed.weight
    assert zero_to_fp32.main([str(tmp_path / "ck"), str(tmp_path / "one"), "--safe_serialization"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{tmp_path / 'one' / 'model.safetensors'}: 0.0 MB\n" and told.err == ""
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(whole[name], state_dict[name]) for name in state_dict)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ck", tmp_path / "many", max_shard_size="300B")
    files = sorted(p.name for p in (tmp_path / "many").glob("*.bin"))
    assert files[0] == f"pytorch_model-00001-of-{len(files):05d}.bin" and len(files) > 1
    parts: dict[str, torch.Tensor] = {}
    for name in files:
        parts |= torch.load(tmp_path / "many" / name, weights_only=True)
    assert parts.keys() == state_dict.keys()
    assert all(torch.equal(parts[name], state_dict[name]) for name in state_dict)
    trained_only = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "ck", exclude_frozen_parameters=True
    )
    assert trained_only.keys() == {*expected, "table"}
    for wrong, message in (
        (
            lambda: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck", tag="global_step9"),
            "no check",
        ),
        (
            lambda: zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), tmp_path / "ck"),
            "build the model",
        ),
        (
            lambda: zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ck", tmp_path, "5 apples"),
            "max_shard_size: expected a size such as 5GB",
        ),
    ):
        with pytest.raises(UserError, match=message):
            wrong()
    assert zero_to_fp32.main([str(tmp_path), str(tmp_path / "x")]) == 2
