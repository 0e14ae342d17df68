"""Models on the meta device: what `initialize` reads slice by slice equals what it makes of `from_pretrained`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.llamas import llama_config, save_llama
from ranks.memory import measure
from ranks.models import VOCAB, save_odd_llama
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import heavylift
from heavylift.api import zero
from heavylift.api.parameters import safe_get_full_fp32_param
from heavylift.errors import UserError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Float32 checkpoints, the head tied or not."""
    root = tmp_path_factory.mktemp("models")
    return {tied: save_odd_llama(root / f"odd-{tied}", tied=tied) for tied in (False, True)}


def ds_config(stage: int, precision: str, optimizer: str = "AdamW", offload: str = "cpu") -> dict[str, Any]:
    block: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": offload, "ratio": 0.6}}
    if stage == 0 or optimizer != "AdamW":
        block.pop("offload_optimizer")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": block}
    config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
    return config | ({} if precision == "fp32" else {precision: {"enabled": True}})


def on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model


def trained(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """Masters, parameters and buffers before training, and the losses of three steps."""
    model.config.use_cache = False
    engine, *_ = heavylift.initialize(model=model, config=config)
    seen: dict[str, Any] = {"master": {}, "param": {}, "buffer": {}, "loss": []}
    for name, param in engine.module.named_parameters():
        if (master := safe_get_full_fp32_param(param)) is not None:  # classes of torch.optim show none
            seen["master"][name] = master
        seen["param"][name] = param.full_tensor().clone() if isinstance(param, DTensor) else param.detach().clone()
    seen["buffer"] = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(3):
        ids = torch.randint(0, VOCAB, (2, 9), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        seen["loss"].append(loss.item())
    engine.destroy()
    return seen


def both_ways(folder: Path, dtype: torch.dtype, config: dict[str, Any]) -> None:
    expected = trained(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), config)
    model = on_meta(folder, dtype)
    assert zero.set_weights_source(model, folder) is model
    got = trained(model, config)
    for kind in ("master", "param", "buffer"):
        assert got[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            assert got[kind][name].dtype == value.dtype, (kind, name)
            assert torch.equal(got[kind][name], value), (kind, name)
    assert got["loss"] == expected["loss"]
    # the comparison of masters means something: they are not the rounded parameters
    if config.get("bf16") and config["optimizer"]["type"] == "AdamW" and dtype == torch.float32:
        assert any(not torch.equal(v, v.bfloat16().float()) for v in got["master"].values())


@pytest.mark.parametrize(
    "stage, precision, optimizer, dtype, tied",
    [
        (3, "bf16", "AdamW", torch.float32, False),
        (3, "bf16", "AdamW", torch.bfloat16, True),
        (1, "fp32", "AdamW", torch.float32, False),
        (0, "bf16", "AdamW", torch.float32, False),
        (2, "bf16", "Adagrad", torch.float32, True),
        (3, "fp16", "AdamW", torch.float32, True),
    ],
)
def test_equals_from_pretrained(
    folders: dict[bool, Path],
    stage: int,
    precision: str,
    optimizer: str,
    dtype: torch.dtype,
    tied: bool,
) -> None:
    run_on_ranks(2, both_ways, folders[tied], dtype, ds_config(stage, precision, optimizer))


def random_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = zero.set_weights_source(on_meta(folder, torch.bfloat16), zero.RandomWeights(std=0.5, seed=3))
    engine, *_ = heavylift.initialize(model=model, config=ds_config(3, "bf16"))
    whole = {}
    for name, param in engine.module.named_parameters():
        assert isinstance(param, DTensor)
        whole[name] = param.full_tensor().float()
    engine.destroy()
    return whole


def test_random_weights(folders: dict[bool, Path]) -> None:
    first, second = run_on_ranks(2, random_weights, folders[False])
    for name, values in first.items():
        assert torch.equal(values, second[name])
        if values.ndim == 1:
            assert (values == (0 if name.endswith("bias") else 1)).all(), name
        else:
            # the standard error of a sample deviation of n values is std / sqrt(2 n); five of them
            assert abs(values.std() - 0.5) < 5 * 0.5 / (2 * values.numel()) ** 0.5 + 2e-3, name


def test_bad_input(folders: dict[bool, Path], tmp_path: Path) -> None:
    folder = folders[False]
    with pytest.raises(UserError, match="has values on cpu"):
        zero.set_weights_source(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), folder)
    with pytest.raises(UserError, match="expected a folder with"):
        zero.set_weights_source(on_meta(folder, torch.float32), tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size += 8
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="config.json asks for"):
        zero.set_weights_source(other, folder)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("table", torch.zeros(2), persistent=False)

    with torch.device("meta"):
        own = Own()
    with pytest.raises(UserError, match="no checkpoint holds"):
        zero.set_weights_source(own, zero.RandomWeights())


def without_source(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        heavylift.initialize(model=on_meta(folder, torch.float32), config=ds_config(3, "fp32"))
    return str(caught.value)


def test_meta_without_source_is_told(folders: dict[bool, Path]) -> None:
    message, _ = run_on_ranks(2, without_source, folders[False])
    assert "set_weights_source" in message and "zero.Init" in message


def peaks(folder: Path) -> tuple[int, int, int]:
    """Bytes at the peak: from the meta device, and by `from_pretrained`; and those of the whole model."""
    config = ds_config(3, "fp32", "SGD")  # no states

    def from_meta() -> Any:
        return heavylift.initialize(
            model=zero.set_weights_source(on_meta(folder, torch.float32), folder), config=config
        )[0]

    def whole_first() -> Any:
        return heavylift.initialize(model=AutoModelForCausalLM.from_pretrained(folder), config=config)[0]

    on_meta(folder, torch.float32)  # imports what it needs
    first = measure(from_meta)
    second = measure(whole_first)
    num_bytes = sum(param.numel() * 4 for param in second.result.module.parameters())
    return first.peak, second.peak, num_bytes


@pytest.mark.soak
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "large", llama_config(8000, 1280, 2560, 5, 4, 2))  # 94 million parameters
    for from_meta, whole_first, num_bytes in run_on_fresh_ranks(4, peaks, folder):
        # a quarter is kept, and while it is read up to twice as much is mapped; the rest are modules imported meanwhile
        assert from_meta < 0.85 * num_bytes
        assert whole_first > num_bytes
