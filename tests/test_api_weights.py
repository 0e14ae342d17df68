"""Whoever writes a weight is believed: the next step starts from what was written, and a checkpoint holds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.small import message_of
from ranks.gather import whole
from ranks.pool import run_on_ranks
from ranks.schedules import slow_down
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import heavylift
from heavylift.api.parameters import safe_get_full_fp32_param

Tensors = dict[str, torch.Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Two layers that the ranks do not divide evenly, a scalar, a buffer, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(2))
        self.extra = "new"

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).tanh()) * self.scale).square().mean()


def make(
    optimizer: str | None = "AdamW",
    precision: str = "bf16",
    stage: int = 2,
    offload: bool = False,
    seed: int = 0,
    freezes: bool = False,
    **more: Any,
) -> Any:
    """An engine on `Net`; other seeds begin with other weights."""
    torch.manual_seed(seed)
    model = Net()
    model.first.requires_grad_(not freezes)
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": 0.6}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, **more}
    if optimizer:
        config["optimizer"] = {"type": optimizer, "params": {"lr": 0.05}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return heavylift.initialize(model=model, config=config)[0]


def step(engine: Any, lr: float = 0.05) -> None:
    """With `lr` 0 every weight keeps the bits that the optimizer believes in."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    x = torch.linspace(-1, 1, 20).view(4, 5) + dist.get_rank()
    engine.backward(engine(x.to(engine.module.first.weight.dtype)).float())
    engine.step()


def weights(engine: Any) -> Tensors:
    engine.settle()
    return {name: whole(p) for name, p in engine.module.named_parameters()}


def masters(engine: Any) -> Tensors:
    found = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def other_weights(engine: Any, dtype: torch.dtype) -> Tensors:
    """New values, whole, the same on every rank."""
    torch.manual_seed(7)
    return {name: torch.randn(p.shape, dtype=torch.float32).to(dtype) for name, p in engine.module.named_parameters()}


def with_the_rest(engine: Any, values: Tensors) -> dict[str, Any]:
    return {**engine.module.state_dict(), **values}


def as_shards(engine: Any, values: Tensors) -> Tensors:
    return {
        name: distribute_tensor(values[name], p.device_mesh, p.placements)
        for name, p in engine.module.named_parameters()
    }


@torch.no_grad()
def copy_in(engine: Any, values: Tensors) -> None:
    for name, param in engine.module.named_parameters():
        param.copy_(as_shards(engine, values)[name])


def copy_by_data(engine: Any, values: Tensors) -> None:
    for name, param in engine.module.named_parameters():
        param.data.copy_(as_shards(engine, values)[name])


def gathered(engine: Any, values: Tensors) -> None:
    with heavylift.zero.GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
        for name, param in engine.module.named_parameters():
            param.copy_(values[name])


WAYS: dict[str, Callable[[Any, Tensors], Any]] = {
    "load_module_state_dict": lambda e, v: e.load_module_state_dict(with_the_rest(e, v)),
    "load_module_state_dict of shards": lambda e, v: e.load_module_state_dict(with_the_rest(e, as_shards(e, v))),
    "load_state_dict": lambda e, v: e.load_state_dict(with_the_rest(e, v)),
    "module.load_state_dict": lambda e, v: e.module.load_state_dict(with_the_rest(e, as_shards(e, v))),
    "copy_": copy_in,
    "GatheredParameters": gathered,
}


def ways_job(optimizer: str, precision: str) -> list[str]:
    """In every way, before the first step and after it; then a step that moves nothing, and what differs."""
    wrong = []
    ways = {**WAYS, "data": copy_by_data} if optimizer == "SGD" else WAYS
    for stage, offload in ((2, False), (3, optimizer == "AdamW")):
        engine = make(optimizer, precision, stage, offload)
        for way, turn in itertools.product(ways, range(2)):
            if turn:
                step(engine)
                engine.settle()
            values = {name: value * (1 + turn) for name, value in other_weights(engine, DTYPES[precision]).items()}
            ways[way](engine, values)
            step(engine, lr=0)
            after = weights(engine)
            wrong += [f"{stage} {way} {turn} {name}" for name in values if not torch.equal(after[name], values[name])]
        engine.destroy()
    return wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_step_starts_from_what_was_written(optimizer: str, precision: str) -> None:
    assert run_on_ranks(2, ways_job, optimizer, precision) == [[], []]


def precision_job(optimizer: str) -> dict[str, Any]:
    engine = make(optimizer, stage=3)
    step(engine)
    before = masters(engine)
    engine.load_module_state_dict(engine.module_state_dict())
    same = masters(engine)
    wide = other_weights(engine, torch.float32)
    engine.load_module_state_dict(with_the_rest(engine, wide))
    found, rounded = masters(engine), weights(engine)
    half = {name: value.half() for name, value in wide.items()}
    engine.load_module_state_dict(with_the_rest(engine, half))
    halves = masters(engine)
    engine.destroy()
    return {
        "hidden": any(not torch.equal(t, t.bfloat16().float()) for t in before.values()),
        "same": all(torch.equal(before[name], same[name]) for name in before),
        "wide": all(torch.equal(found[name], wide[name]) for name in wide),
        "rounded": all(torch.equal(rounded[name], wide[name].bfloat16()) for name in wide),
        "half": all(torch.equal(halves[name], half[name].float()) for name in wide),
    }


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_masters_keep_the_bits_that_they_are_given(optimizer: str) -> None:
    """All of float32 values; and what bfloat16 does not show, where a bfloat16 value is the one that is there."""
    assert all(run_on_ranks(2, precision_job, optimizer)[0].values())


def without_masters_job(folder: Path, optimizer: str, precision: str) -> dict[str, Any]:
    """Checkpoints in which some or all parameters have no master, into an engine that trains them."""
    wrong: dict[str, Any] = {}
    for name, how in (("frozen", {"freezes": True}), ("none", {"optimizer": None})):
        saver = make(**{"optimizer": optimizer, "precision": precision, "seed": 1, **how})
        saver.save_checkpoint(folder, tag=name)
        truth = weights(saver)
        saver.destroy()
        for more in ({"load_module_only": True}, {"load_optimizer_states": name == "frozen"}):
            engine = make(optimizer, precision, stage=3, seed=2)
            step(engine)
            engine.load_checkpoint(folder, tag=name, **more)
            known = masters(engine)
            step(engine, lr=0)
            after = weights(engine)
            engine.destroy()
            for key in truth:
                if not torch.equal(after[key], truth[key]) or not torch.equal(known[key].to(truth[key]), truth[key]):
                    wrong[f"{name} {more} {key}"] = (after[key], truth[key])
    return wrong


@pytest.mark.parametrize(("optimizer", "precision"), [("AdamW", "bf16"), ("AdamW", "fp32"), ("SGD", "bf16")])
def test_a_checkpoint_without_masters_is_believed(optimizer: str, precision: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, without_masters_job, tmp_path, optimizer, precision) == [{}, {}]


def wide_checkpoint_job(folder: Path) -> bool:
    saver = make(None, "fp32", seed=1)
    saver.save_checkpoint(folder)
    truth = weights(saver)
    saver.destroy()
    engine = make("AdamW", "bf16", seed=2)
    engine.load_checkpoint(folder, load_module_only=True)
    found = masters(engine)
    engine.destroy()
    return all(torch.equal(found[name], truth[name]) for name in truth)


def test_a_float32_checkpoint_keeps_its_bits_in_the_masters(tmp_path: Path) -> None:
    assert run_on_ranks(2, wide_checkpoint_job, tmp_path) == [True, True]


def saved_at_once_job(folder: Path, optimizer: str) -> list[str]:
    """Weights are written, and saved before any step has seen them."""
    wrong = []
    for turn in range(2):
        engine = make(optimizer, stage=3, offload=optimizer == "AdamW")
        for _ in range(turn):
            step(engine)
        engine.settle()
        values = other_weights(engine, torch.bfloat16)
        copy_in(engine, values)
        read = masters(engine)
        copy_in(engine, {name: value * 2 for name, value in values.items()})
        engine.save_checkpoint(folder, tag=f"{optimizer}{turn}")
        engine.destroy()
        other = make(optimizer, stage=3, seed=3)
        other.load_checkpoint(folder, tag=f"{optimizer}{turn}")
        loaded = weights(other)
        other.destroy()
        wrong += [f"{turn} read {n}" for n in values if not torch.equal(read[n], values[n].float())]
        wrong += [f"{turn} saved {n}" for n in values if not torch.equal(loaded[n], values[n] * 2)]
    return wrong


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_checkpoint_right_after_writing_holds_what_was_written(optimizer: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, saved_at_once_job, tmp_path, optimizer) == [[], []]


def names_job() -> dict[str, Any]:
    engine = make(stage=3)
    engine.module.extra, engine.module.seen = "old", torch.tensor([1.0, 2.0])
    step(engine)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in engine.state_dict().items()}
    truth, kinds = weights(engine), {type(v).__name__ for v in saved.values()}
    step(engine)
    engine.module.extra = "newer"
    engine.module.seen.zero_()
    result = engine.load_state_dict(saved)
    after = weights(engine)
    some = {"second.bias": torch.ones(3), "third.bias": torch.ones(3)}
    partly = engine.load_module_state_dict(some, strict=False)
    replicated = {k: whole(v) if isinstance(v, DTensor) else v for k, v in saved.items()}
    gathered_names = [k for k, v in saved.items() if isinstance(v, DTensor)]
    for name in gathered_names:
        mesh = engine.module.second.bias.device_mesh
        replicated[name] = distribute_tensor(replicated[name], mesh, [torch.distributed.tensor.Replicate()])
    bad = {**saved, "second.bias": torch.ones(4), "seen": 5, "first.weight": torch.zeros(3, 5)}
    messages = {
        "strict": message_of(lambda: engine.load_state_dict(some)),
        "assign": message_of(lambda: engine.load_state_dict(saved, assign=True)),
        "shapes": message_of(lambda: engine.load_module_state_dict(bad)),
        "kind": message_of(lambda: engine.load_module_state_dict("weights.bin")),
        "custom": message_of(lambda: engine.load_module_state_dict(saved, custom_load_fn=print)),
    }
    untouched = whole(engine.module.first.weight)
    engine.load_module_state_dict(replicated)
    again = weights(engine)
    found = {
        "result": (result.missing_keys, result.unexpected_keys),
        "partly": (sorted(partly.missing_keys), partly.unexpected_keys),
        "bias": whole(engine.module.second.bias),
        "kinds": kinds,
        "extra": engine.module.extra,
        "seen": engine.module.seen.tolist(),
        "after": all(torch.equal(after[name], truth[name]) for name in truth),
        "again": all(torch.equal(again[name], truth[name]) for name in truth),
        "untouched": torch.equal(untouched, truth["first.weight"]),
        "messages": messages,
    }
    engine.destroy()
    return found


def test_an_engine_loads_its_own_state_dict_and_says_what_is_wrong_with_another() -> None:
    found = run_on_ranks(2, names_job)[0]
    assert found["kinds"] == {"DTensor", "Tensor", "str"}
    assert found["result"] == ([], []) and found["after"] and found["again"]
    assert found["extra"] == "old" and found["seen"] == [1.0, 2.0]
    missing, unexpected = found["partly"]
    assert "first.weight" in missing and "second.bias" not in missing and unexpected == ["third.bias"]
    messages = found["messages"]
    assert messages["strict"].startswith("load_state_dict: missing ['")
    assert messages["strict"].endswith("], unknown ['third.bias']; or strict=False")
    assert messages["assign"].startswith("load_state_dict: assign=True would replace the sharded parameters")
    assert sorted(messages["shapes"].splitlines()) == [
        "load_module_state_dict: second.bias has shape (4,) there, (3,) in this model",
        "load_module_state_dict: seen should be a tensor, got 5",
    ]
    assert found["untouched"], "nothing is written where something is wrong"
    assert messages["kind"].startswith("load_module_state_dict: expected a state_dict (names and tensors), got ")
    assert "custom_load_fn is not supported" in messages["custom"]


# ---- while a step is under way ---------------------------------------------------------------------------------------

SCHEDULES = ("deferred", "speculative", "auto")


def slow_engine(schedule: str, seed: int = 0) -> Any:
    """Its host parts step so late that whoever does not wait comes before them."""
    engine = make(stage=3, offload=True, seed=seed, heavylift={"schedule": schedule})
    slow_down(engine.optimizer, 0.02)
    return engine


def step_by_hand(engine: Any, lr: float, between: Callable[[], Any] = lambda: None) -> None:
    """`between`: done between backward and step()."""
    engine.optimizer.param_groups[0]["lr"] = lr
    x = torch.linspace(-1, 1, 20).view(4, 5).bfloat16() + dist.get_rank()
    engine.backward(engine(x).float())
    between()
    engine.step()


def right_after_a_step_job(schedule: str) -> list[str]:
    """Whole and in part, written and read."""
    engine = slow_engine(schedule)
    values = other_weights(engine, torch.bfloat16)
    shards = as_shards(engine, values)
    second = {name.removeprefix("second."): t for name, t in shards.items() if name.startswith("second.")}
    writes: dict[str, Callable[[], Any]] = {
        "whole": lambda: engine.module.load_state_dict(with_the_rest(engine, shards)),
        "part": lambda: engine.module.second.load_state_dict(second),
    }
    wrong = []
    for name, write in writes.items():
        step_by_hand(engine, 0.05)
        write()
        step_by_hand(engine, 0.0)
        after = weights(engine)
        checked = values if name == "whole" else [n for n in values if n.startswith("second.")]
        wrong += [f"{name} {n}" for n in checked if not torch.equal(after[n], values[n])]
    step_by_hand(engine, 0.05)
    read = {name: t.to_local().clone() for name, t in engine.module.second.state_dict().items()}
    engine.settle()
    wrong += [n for n, t in engine.module.second.named_parameters() if not torch.equal(read[n], t.detach().to_local())]
    num_hooks = count_hooks(engine.module)
    engine.destroy()
    num_modules = len(list(engine.module.modules()))
    return wrong + ([] if num_hooks - count_hooks(engine.module) == 2 * num_modules else ["hooks are left"])


def count_hooks(module: nn.Module) -> int:
    return sum(len(m._state_dict_pre_hooks) + len(m._load_state_dict_pre_hooks) for m in module.modules())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_dict_is_loaded_and_read_behind_the_step_under_way(schedule: str) -> None:
    assert run_on_ranks(2, right_after_a_step_job, schedule) == [[], []]


def too_early_job(schedule: str) -> tuple[str, bool]:
    """Written without waiting, which no hook sees: the next forward says so. Then written again."""
    engine = slow_engine(schedule)
    values = other_weights(engine, torch.bfloat16)
    step_by_hand(engine, 0.05)
    with torch.no_grad():
        engine.module.second.weight.zero_()
    message = message_of(engine.settle)
    copy_in(engine, values)
    step_by_hand(engine, 0.0)
    after = weights(engine)
    engine.destroy()
    return message, all(torch.equal(after[name], values[name]) for name in values)


@pytest.mark.parametrize("schedule", ["deferred", "speculative"])
def test_a_weight_that_is_written_while_its_step_is_under_way_is_named(schedule: str) -> None:
    for message, good in run_on_ranks(2, too_early_job, schedule):
        assert message.startswith("second.weight was written while its step was still under way, which writes it too;")
        assert "engine.settle()" in message and "\n" not in message and good


def between_job() -> dict[str, Any]:
    """Weights that change between backward and step()."""
    found: dict[str, Any] = {}
    for schedule in ("synchronous", "deferred", "speculative"):
        engine = slow_engine(schedule)
        values = other_weights(engine, torch.bfloat16)
        step_by_hand(engine, 0.05)
        engine.settle()
        write = lambda engine=engine, values=values: copy_in(engine, values)  # noqa: E731
        if schedule == "speculative":
            load = lambda engine=engine: engine.load_state_dict(engine.state_dict())  # noqa: E731
            refused = lambda load=load: found.update(load=message_of(load))  # noqa: E731
            step_by_hand(engine, 0.05, refused)
            found[schedule] = message_of(lambda engine=engine, write=write: step_by_hand(engine, 0.05, write))
        else:
            step_by_hand(engine, 0.05, write)
            found[schedule] = weights(engine), masters(engine)
        engine.destroy()
    return found


def test_a_deferred_step_starts_from_the_weights_of_step() -> None:
    found = run_on_ranks(2, between_job)[0]
    for one, other in zip(found["synchronous"], found["deferred"], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert found["load"].startswith("cannot write the parameter of ") and "has taken the step" in found["load"]
    message = found["speculative"]
    assert "was written between backward, which has taken its step, and step(); write before backward" in message
