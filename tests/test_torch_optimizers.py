"""Classes of torch.optim, by name in the file and as objects of the script: arguments, steps on shards, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.small import message_of
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.config.deepspeed.parse import interpret
from heavylift.config.deepspeed.torch_optimizers import TORCH_OPTIMIZERS
from heavylift.errors import UserError

BASE = {"train_batch_size": 4, "gradient_clipping": 1.0}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.3},
    "ASGD": {"t0": 1.0, "lambd": 0.01, "foreach": True},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": [0.8, 0.95]},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_arguments_are_those_of_torch(name: str) -> None:
    """Names and defaults."""
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    theirs = {key: one.default for key, one in parameters.items() if key != "params"}
    ours = {key: field.default for key, field in TORCH_OPTIMIZERS[name].model_fields.items() if key != "max_grad_norm"}
    assert ours == theirs


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (
            "SGD",
            {"lr": 0.1, "foo": 1},
            "optimizer.params.foo: unknown key; remove it (known: weight_decay, maximize, foreach, lr, ",
        ),
        ("SGD", {"momentun": 0.9}, "optimizer.params.momentun: unknown key; did you mean optimizer.params.momentum?"),
        ("sgd", {"lr": -1}, "optimizer.params.lr: expected a number ≥ 0, got -1"),
        ("SGD", {"lr": "1e-2"}, "optimizer.params.lr: expected a number ≥ 0, got '1e-2'; remove the quotes"),
        ("RAdam", {"betas": [0.9, 1]}, "optimizer.params.betas: expected a list of 2 values, each a number"),
        ("SGD", {"nesterov": True}, "optimizer.params.nesterov: needs momentum above 0 and dampening 0, got 0 and 0"),
        ("Adagrad", {"fused": True}, "optimizer.params.fused: heavylift does not have this; remove it: parameters are"),
        ("Adamax", {"capturable": True}, "optimizer.params.capturable: heavylift does not have this; remove it"),
        ("Adafactor", {}, "optimizer.type: heavylift does not have Adafactor; use AdamW: Adafactor needs means over"),
        ("rprop", {}, "optimizer.type: heavylift does not have rprop; use SGD or AdamW"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_built(kind: str, params: dict[str, Any], message: str) -> None:
    (problem,) = interpret(BASE | {"optimizer": {"type": kind, "params": params}}, 1).problems
    assert problem.startswith(f"ds_config: {message}"), problem


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 1))


def batches() -> torch.Tensor:
    """Three of them: [3, 4, 5]."""
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))


def plain_steps(name: str) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), **ARGUMENTS.get(name, {}))
    for batch in batches():
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.state_dict().items()}


def steps_job(stage: int) -> dict[str, float]:
    """Largest difference from plain torch of every class, by the file and as the script's object."""
    rank, num_rows = dist.get_rank(), 4 // dist.get_world_size()
    found = {}
    for name in TORCH_OPTIMIZERS:
        wanted = plain_steps(name)
        for way in ("file", "object"):
            model = make_model()
            params, client = ARGUMENTS.get(name, {}), None
            config: dict[str, Any] = BASE | {"zero_optimization": {"stage": stage}}
            if way == "file":
                config["optimizer"] = {"type": name, "params": params}
            else:
                client = getattr(torch.optim, name)(model.parameters(), **params)
            engine = heavylift.initialize(model=model, optimizer=client, config=config)[0]
            for batch in batches():
                engine.backward(engine(batch[rank * num_rows : (rank + 1) * num_rows]).square().mean())
                engine.step()
            got = engine.module_state_dict()
            whole = {key: value.full_tensor() if stage == 3 else value for key, value in got.items()}
            found[f"{name}, {way}"] = max(float((whole[key] - wanted[key]).abs().max()) for key in wanted)
            engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_every_class_steps_as_plain_torch(world_size: int, stage: int) -> None:
    for case, difference in run_on_ranks(world_size, steps_job, stage)[0].items():
        assert difference < 1e-6, case  # gradients of two halves add up in another order


def adagrad_states_job(way: str) -> dict[str, Any]:
    """What Adagrad's states are before the first step, where the parameters are bfloat16."""
    model = make_model()
    config: dict[str, Any] = BASE | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    arguments, client = {"initial_accumulator_value": 0.5}, None
    if way == "file":
        config["optimizer"] = {"type": "Adagrad", "params": arguments}
    else:
        client = torch.optim.Adagrad(model.parameters(), **arguments)
    engine, optimizer, *_ = heavylift.initialize(model=model, optimizer=client, config=config)
    states = optimizer.state
    sums = [state["sum"] for state in states.values()]
    stepped = {id(optimizer.master_of(param)) for param in engine.module.parameters()}
    found = {
        "of the masters": {id(param) for param in states} == stepped,
        "dtypes": {one.dtype for one in sums},
        "start": {value for one in sums for value in one.full_tensor().flatten().tolist()},
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("way", ["file", "object"])
def test_adagrads_states_are_those_of_the_masters(way: str) -> None:
    found = run_on_ranks(2, adagrad_states_job, way)[0]
    assert found == {"of the masters": True, "dtypes": {torch.float32}, "start": {0.5}}


def refused_objects_job() -> dict[str, str]:
    """What initialize() says to objects that cannot step shards."""
    kinds: dict[str, Any] = {
        "Adafactor": torch.optim.Adafactor,
        "Rprop": torch.optim.Rprop,
        "LBFGS": torch.optim.LBFGS,
        "SparseAdam": torch.optim.SparseAdam,
        "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
        "fused": lambda params: torch.optim.SGD(params, fused=True),
        "differentiable": lambda params: torch.optim.AdamW(params, differentiable=True),
    }
    said = {}
    for name, kind in kinds.items():
        model = make_model()
        optimizer = kind(list(model.parameters()))
        said[name] = message_of(lambda m=model, o=optimizer: heavylift.initialize(model=m, optimizer=o, config=BASE))
    return said


def test_objects_that_cannot_step_shards_are_refused() -> None:
    said = run_on_ranks(1, refused_objects_job)[0]
    for name in ("Adafactor", "Rprop", "LBFGS", "SparseAdam", "Muon"):
        assert said[name].startswith(f"optimizer: heavylift does not have torch.optim.{name}; use "), said[name]
    assert said["fused"] == "optimizer: fused=True of SGD does not take shards; leave it out"
    assert said["differentiable"].startswith("optimizer: differentiable=True of AdamW")


class Mixed(torch.optim.Optimizer):
    """Another's, that mixes plain tensors with the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(torch.ones(param.shape))


def mixed_job() -> str:
    model = make_model()
    engine = heavylift.initialize(model=model, optimizer=Mixed(model.parameters()), config=BASE)[0]
    engine.backward(engine(batches()[0]).square().mean())
    said = message_of(engine.step)
    engine.destroy()
    return said


def test_another_ones_optimizer_that_does_not_take_shards_is_one_line() -> None:
    (said,) = run_on_ranks(1, mixed_job)
    assert said.startswith("optimizer: Mixed cannot step sharded parameters, which are DTensors (aten.sub_.Tensor got ")
    assert said.endswith("); use torch.optim.AdamW, or one that steps each element by itself") and "\n" not in said


def test_a_line_of_the_file_is_named(tmp_path: Any) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 4,\n"optimizer": {"type": "SGD",\n"params": {"lr": -1}}}')
    with pytest.raises(UserError, match=r"ds_config.json:3: optimizer.params.lr: expected a number ≥ 0, got -1"):
        heavylift.initialize(model=make_model(), config=str(file))
