"""`engine.offload_states` and `reload_states`: no bit changes, and nothing trains on states that are away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.small import message_of, warnings_of
from ranks.gather import whole
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift import utils
from heavylift.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from heavylift.config.schema import Tier

Tensors = dict[str, torch.Tensor]
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "half deferred": {"ratio": 0.5, "schedule": "deferred"},
    "half speculative": {"ratio": 0.5, "schedule": "speculative"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "split": {"state_format": "split"},
    "int8": {"state_format": "int8"},
}


def make(optimizer: str = "AdamW", stage: int = 3, **way: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    zero: dict[str, Any] = {"stage": stage}
    if "ratio" in way:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": way.pop("ratio")}
    own = {key: way.pop(key) for key in ("schedule", "state_format") if key in way}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "bf16": {"enabled": True}, **way}
    config |= {"optimizer": {"type": optimizer, "params": {"lr": 0.05}}, "heavylift": own}
    return heavylift.initialize(model=model, config=config)[0]


def rows(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    return torch.randn(4, 7, generator=generator).bfloat16()


def step(engine: Any, seed: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(rows(10 * seed + micro)).float().square().mean())
        engine.step()


def states(engine: Any) -> Tensors:
    engine.settle()
    found: Tensors = {}
    for name, param in engine.module.named_parameters():
        found[name] = whole(param)
        found[f"{name}.master"] = utils.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = utils.safe_get_full_optimizer_state(param, key)
    return found


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def on_device(engine: Any) -> int:
    """Bytes of the states on the device, counted."""
    parts = [part for parts in engine.optimizer.parts for part in parts if part.tier is Tier.DEVICE]
    return sum(t.nbytes for p in parts for t in [p.master, p.exp_avg, p.exp_avg_sq, *(p.scales or ())])


def there_and_back_job(way: str, folder: Path) -> list[str]:
    wrong = []
    engine, plain = make(**WAYS[way]), make(**WAYS[way])
    for one in (engine, plain):
        step(one, 0)
        step(one, 1)
    usage = vars(engine.optimizer.usage).copy()
    for round_trip in range(2):
        before = states(engine)
        engine.offload_states(pin_memory=bool(round_trip))
        away = engine.optimizer.usage
        if usage["device_bytes"] - away.device_bytes != on_device(engine):
            wrong.append("what the device holds is not what is told")
        if away.host_bytes <= usage["host_bytes"]:
            wrong.append("what the host holds is not what is told")
        wrong += [] if same(before, states(engine)) else ["states that are away are read"]
        with torch.no_grad():
            wrong += [] if torch.equal(engine(rows(5)), plain(rows(5))) else ["evaluation meanwhile"]
        engine.save_checkpoint(folder / str(round_trip))
        if not message_of(lambda: engine(rows(5))).startswith("engine: its optimizer states are on the host since"):
            wrong.append("the message")
        if not message_of(engine.step).startswith("engine: its optimizer states are on the host since"):
            wrong.append("the message of step")
        engine.reload_states()
        wrong += [] if vars(engine.optimizer.usage) == usage else ["memory is not what it was"]
        wrong += [] if same(before, states(engine)) else ["states that are back"]
        for one in (engine, plain):
            step(one, 2 + round_trip)
        wrong += [] if same(states(plain), states(engine)) else ["the next step"]
    plain.load_checkpoint(folder / "1")
    wrong += [] if same(before, states(plain)) else ["the checkpoint"]
    engine.reload_states()
    engine.destroy()
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back(way: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, there_and_back_job, way, tmp_path) == [[], []]


def part_job() -> dict[str, Any]:
    """Some of the states, then the rest; what stays; set while away."""
    engine, found = make(), {}
    step(engine, 0)
    kinds = OffloadStateTypeEnum
    engine.offload_states(include=[kinds.optim_states])
    found["moments"] = set(engine._parked.names)
    engine.offload_states(include={"hp_params"}, device=OffloadDeviceEnum.cpu)
    found["all"] = set(engine._parked.names)
    found["told"] = warnings_of(lambda: engine.offload_states(include=[kinds.lp_params, kinds.contiguous_grad_buffer]))
    weight = engine.module[0].weight
    utils.safe_set_full_optimizer_state(weight, torch.full((5, 7), 0.25), "exp_avg")
    utils.safe_set_full_fp32_param(weight, torch.full((5, 7), 0.3))
    engine.reload_states()
    found["none"] = set(engine._parked.names)
    found["set"] = [
        bool((utils.safe_get_full_optimizer_state(weight, "exp_avg") == 0.25).all()),
        bool((utils.safe_get_full_fp32_param(weight) == 0.3).all()),
    ]
    engine.offload_states(device="none")
    found["nowhere"] = set(engine._parked.names)
    step(engine, 1)
    return found


def test_parts_of_the_states() -> None:
    found = run_on_ranks(1, part_job)[0]
    assert found["moments"] == {"exp_avg", "exp_avg_sq"}
    assert found["all"] == {"master", "exp_avg", "exp_avg_sq"} and found["none"] == found["nowhere"] == set()
    assert [line.split(":")[1] for line in found["told"]] == [
        " lp_params has no effect",
        " contiguous_grad_buffer has no effect",
    ]
    assert found["set"] == [True, True]


def refused_job() -> list[str]:
    engine, sgd = make(), make("SGD")
    messages = [
        message_of(lambda: engine.offload_states(include=["weights"])),
        message_of(lambda: engine.offload_states(include="optim_states")),
        message_of(lambda: engine.offload_states(device="disk")),
        message_of(lambda: engine.offload_states(device="nvme")),
        message_of(sgd.offload_states),
    ]
    sgd.reload_states()
    engine.backward(engine(rows(0)).float().square().mean())
    messages.append(message_of(engine.offload_states))
    engine.step()
    engine.destroy()
    return [*messages, message_of(engine.offload_states)]


def test_what_is_refused() -> None:
    messages = run_on_ranks(1, refused_job)[0]
    expected = [
        "include= knows optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer, not 'weights'",
        "include= should be a list of optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer, got "
        "'optim_states'",
        "device= should be \"cpu\", got 'disk'",
        'device="nvme" is not supported; take "cpu"',
        "SGD keeps its states on the device; only those of Adam and AdamW can be moved",
        "called between backward and step(), which needs the states; call it after",
    ]
    assert messages[:-1] == [f"offload_states: {text}" for text in expected]
    assert messages[-1].startswith("engine: destroy() has ended it")
