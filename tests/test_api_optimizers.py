"""What trains: the configured optimizer, a script's own object or function, groups, schedulers, what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.models import NUM_STEPS, make_branches
from parity_api.runs import Case, ds_config, masters, train
from parity_api.small import warnings_of
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.api import parameters as utils
from heavylift.api.optimizers import DeepSpeedCPUAdam, FusedAdam
from heavylift.config.schema import StateFormat
from heavylift.errors import UserError
from heavylift.offload.optimizer import TieredAdamW

Groups = list[dict[str, Any]]


def two_groups(model: nn.Module) -> Groups:
    """Biases with their own rate and no decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in trained if p.ndim == 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, foreach=False)


def adam_l2(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=1e-2, foreach=False)


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": adamw, "adam_l2": adam_l2, "momentum": momentum}


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def client_job(name: str, case: Case, as_functions: bool) -> dict[str, Any]:
    """A script's optimizer over two groups and its scheduler, made before initialize() or by it."""
    model = make_branches()
    groups = two_groups(model)
    config = ds_config(case, dist.get_world_size())
    del config["optimizer"]
    if as_functions:
        optimizer: Any = MAKERS[name]
        scheduler: Any = halving
    else:
        optimizer = MAKERS[name](groups)
        scheduler = halving(optimizer)
    engine, used, loader, returned = heavylift.initialize(
        model=model, optimizer=optimizer, model_parameters=groups, lr_scheduler=scheduler, config=config
    )
    assert loader is None and returned is engine.lr_scheduler and used is engine.optimizer
    kind = type(used).__name__
    curve = train(engine, "branches", case.precision, case.accumulation)
    result = {"kind": kind, "weights": curve.weights, "lr": engine.get_lr(), "mom": engine.get_mom()}
    engine.destroy()
    return result


def plain_weights(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    from parity_api.models import micro_batches

    model = make_branches()
    optimizer = MAKERS[name](two_groups(model))
    scheduler = halving(optimizer)
    for batches in micro_batches("branches", 2, torch.float32):
        for batch in batches:
            (model(**batch)["loss"] / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}, [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("name", "case", "as_functions", "kind"),
    [
        ("adamw", Case("branches", 3, "cpu"), False, "TieredAdamW"),
        ("adamw", Case("branches", 1, "none"), True, "TieredAdamW"),
        ("adam_l2", Case("branches", 3, "none"), False, "TorchStep"),
        ("momentum", Case("branches", 2, "none"), False, "TorchStep"),
        ("momentum", Case("branches", 0, "none"), True, "TorchStep"),
        ("momentum", Case("branches", 3, "none", "bf16"), True, "TorchStep"),
    ],
)
def test_a_scripts_own_optimizer_and_scheduler(name: str, case: Case, as_functions: bool, kind: str) -> None:
    result = run_on_ranks(2, client_job, name, case, as_functions)[0]
    weights, lr = plain_weights(name)
    assert result["kind"] == kind
    assert result["lr"] == pytest.approx(lr, rel=1e-12)
    assert result["mom"] == [{"momentum": 0.9, "adamw": (0.8, 0.95), "adam_l2": (0.9, 0.999)}[name]] * 2
    for key, weight in weights.items():
        if not key.startswith("frozen"):
            tolerance = 1e-6 if case.precision == "fp32" else 2e-2
            assert torch.allclose(result["weights"][key], weight, atol=tolerance), key


def odd_setups_job() -> dict[str, Any]:
    """Some parameters only; configured optimizers; none at all."""
    case = Case("branches", 2, "cpu")
    model = make_branches()
    engine, optimizer, _, _ = heavylift.initialize(
        model=model, config=ds_config(case, 2), model_parameters=[*model.left.parameters(), *model.outside.parameters()]
    )
    start = masters(engine)
    assert isinstance(optimizer, TieredAdamW)
    after = train(engine, "branches", "fp32", 1).weights
    moved = {name for name in start if not torch.equal(start[name], after[name])}
    engine.destroy()

    config = ds_config(Case("branches", 3), 2, optimizer={"type": "Adagrad", "params": {"lr": 0.1}})
    engine, optimizer, _, _ = heavylift.initialize(model=make_branches(), config=config)
    inner = type(optimizer.inner).__name__  # type: ignore[union-attr]
    engine.destroy()

    config = ds_config(Case("branches", 3), 2)
    del config["optimizer"]
    engine, optimizer, _, _ = heavylift.initialize(model=make_branches(), config=config)
    with torch.no_grad():
        loss = engine(torch.ones(8, 5), torch.ones(8, 1))["loss"]
    with pytest.raises(UserError) as raised:
        engine.step()
    plain = make_branches()(torch.ones(8, 5), torch.ones(8, 1))["loss"]
    engine.destroy()
    return {"moved": moved, "inner": inner, "none": optimizer, "message": str(raised.value), "loss": (loss, plain)}


def test_some_parameters_other_classes_and_no_optimizer() -> None:
    result = run_on_ranks(2, odd_setups_job)[0]
    assert result["moved"] == {"left.weight", "left.bias", "outside.weight", "outside.bias"}
    assert result["inner"] == "Adagrad"
    assert result["none"] is None
    assert result["message"].startswith("step: there is no optimizer; add an `optimizer` block")
    assert torch.allclose(*result["loss"])


def scheduler_of_the_client_job() -> list[str]:
    """Python's warnings while a scheduler over the script's own AdamW steps."""
    model = make_branches()
    optimizer = adamw(model.parameters())
    scheduler = halving(optimizer)
    config = ds_config(Case("branches", 2, "cpu"), dist.get_world_size())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine, *_ = heavylift.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
        train(engine, "branches", "fp32", 1)
        assert engine.get_lr()[0] < 1e-2
        engine.destroy()
    return [str(one.message) for one in told if "lr_scheduler" in str(one.message)]


def test_torch_does_not_warn_of_the_order_of_a_schedulers_steps() -> None:
    assert run_on_ranks(1, scheduler_of_the_client_job)[0] == []


def adam_of_the_file_job() -> dict[str, Any]:
    """What `bias_correction` and `adam_w_mode` of a file come to, where it decays and where only a group does."""
    said: dict[str, Any] = {}
    for name, offload, params, decay in [
        ("uncorrected", "cpu", {"bias_correction": False}, 0.1),
        ("no decay", "cpu", {"adam_w_mode": False}, 0.0),
        ("a group's decay", "none", {"adam_w_mode": False}, 0.1),
        ("on the host", "cpu", {"adam_w_mode": False}, 0.1),
        ("uncorrected, L2", "none", {"adam_w_mode": False, "bias_correction": False}, 0.1),
    ]:
        model = make_branches()
        groups = [{"params": list(model.parameters()), "weight_decay": decay}]
        config = ds_config(Case("branches", 2, offload), 1, optimizer={"type": "Adam", "params": params})
        try:
            engine, optimizer, *_ = heavylift.initialize(model=model, model_parameters=groups, config=config)
        except UserError as error:
            said[name] = str(error)
            continue
        said[name] = (type(optimizer).__name__, optimizer.param_groups[0].get("bias_correction"))
        engine.destroy()
    return said


def test_adam_as_the_file_describes_it() -> None:
    said = run_on_ranks(1, adam_of_the_file_job)[0]
    assert said["uncorrected"] == ("TieredAdamW", False)
    assert said["no decay"] == ("TieredAdamW", True)
    assert said["a group's decay"] == ("TorchStep", None), "an L2 term, as adam_w_mode asks"
    assert "Adam with an L2 term (adam_w_mode false) cannot run on the host" in said["on the host"]
    assert said["uncorrected, L2"].startswith("optimizer.params.bias_correction: false is there with decoupled")


class AdamW(torch.optim.SGD):
    """Another's class by that name."""


class Descending(torch.optim.AdamW):
    """A step of its own, which TieredAdamW does not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(1.0)


def of_a_fused_adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    """As Accelerate makes it where the configuration offloads, of the AdamW that the Trainer makes by default."""
    return DeepSpeedCPUAdam(torch.optim.AdamW(params, lr=lr, fused=True).param_groups, lr=lr)


def lookalikes_job() -> dict[str, Any]:
    """Which optimizer trains where a script's bears the name of AdamW, derives from it, or is it; and what is said."""
    seen: dict[str, Any] = {}
    for kind in (AdamW, Descending, torch.optim.AdamW, torch.optim.Adam, FusedAdam, DeepSpeedCPUAdam, of_a_fused_adamw):
        model = make_branches()
        config = ds_config(Case("branches", 2, "none"), 1)
        del config["optimizer"]
        engines: list[Any] = []
        said = warnings_of(
            lambda model=model, kind=kind, config=config, engines=engines: engines.extend(
                heavylift.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)[:2]
            )
        )
        engine, used = engines
        before = masters(engine)
        after = train(engine, "branches", "fp32", 1).weights
        moved_by = (before["left.weight"] - after["left.weight"]).unique().tolist()
        seen[kind.__qualname__ if kind in (AdamW, Descending) else f"real {kind.__name__}"] = (
            type(used).__name__,
            moved_by if kind is Descending else None,
            said,
        )
        engine.destroy()
    for kind in (AdamW, Descending):
        model = make_branches()
        config = ds_config(Case("branches", 2, "cpu"), 1)
        with pytest.raises(UserError) as raised:
            heavylift.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)
        seen[f"{kind.__name__} offloaded"] = str(raised.value)
    return seen


def test_only_adamw_itself_is_taken_over() -> None:
    seen = run_on_ranks(1, lookalikes_job)[0]
    note = (
        "optimizer: test_api_optimizers.{} is not torch.optim's class, so its own step runs, with its states on the "
        "device; pass torch.optim.AdamW for heavylift's"
    )
    assert seen["AdamW"] == ("TorchStep", None, [note.format("AdamW")])
    kind, moved_by, said = seen["Descending"]
    assert (kind, said) == ("TorchStep", [note.format("Descending")])
    assert moved_by == pytest.approx([float(NUM_STEPS)] * len(moved_by)), "steps of its own"
    for name in ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "of_a_fused_adamw"):
        assert seen[f"real {name}"] == ("TieredAdamW", None, []), name
    for name in ("AdamW", "Descending"):
        assert seen[f"{name} offloaded"].startswith(
            f"optimizer: test_api_optimizers.{name} cannot run on the host; use torch.optim.AdamW"
        )


def refusals_job() -> dict[str, str]:
    """What initialize() refuses, and its message."""
    none, cpu = Case("branches", 3, "none"), Case("branches", 3, "cpu")
    model = make_branches()
    stepped = adamw(two_groups(model))
    model(torch.ones(2, 5), torch.ones(2, 1))["loss"].backward()
    stepped.step()
    frozen = make_branches().requires_grad_(False)
    meta = make_branches().to("meta")
    twice = make_branches()
    config = ds_config(none, 1)
    used = make_branches()
    engine = heavylift.initialize(model=used, config=config)[0]
    engine.destroy()
    calls: dict[str, dict[str, Any]] = {
        "used": {"model": used, "config": config},
        "no model": {"config": config},
        "no config": {"model": make_branches()},
        "two configs": {"model": make_branches(), "config": config, "config_params": config},
        "offloaded SGD": {
            "model": (m := make_branches()),
            "optimizer": momentum(two_groups(m)),
            "config": ds_config(cpu, 1),
        },
        "another's": {"model": make_branches(), "optimizer": adamw(two_groups(make_branches())), "config": config},
        "stepped": {"model": model, "optimizer": stepped, "config": config},
        "an odd optimizer": {"model": make_branches(), "optimizer": 3, "config": config},
        "nothing to train": {"model": frozen, "config": config},
        "complex": {"model": torch.nn.Linear(2, 2, bias=False, dtype=torch.complex64), "config": config},
        "on meta": {"model": meta, "config": config},
        "low precision": {"model": make_branches().bfloat16(), "config": config},
        "a tensor": {"model": make_branches(), "model_parameters": torch.ones(3), "config": config},
        "in two groups": {
            "model": twice,
            "model_parameters": [{"params": twice.parameters()}, {"params": [twice.late]}],
            "config": config,
        },
        "sequence parallel": {"model": make_branches(), "config": config, "mesh_param": (1, 2)},
        "an engine": {"model": engine, "config": config},
        "a list": {"model": nn.ModuleList([make_branches()]), "config": config},
        "no parameters": {"model": make_branches(), "model_parameters": iter(()), "config": config},
        "empty groups": {"model": make_branches(), "model_parameters": [{"params": []}], "config": config},
        "scheduler by name": {"model": make_branches(), "lr_scheduler": "cos", "config": config},
        "scheduler of another": {"model": make_branches(), "lr_scheduler": halving(stepped), "config": config},
        "a word of data": {"model": make_branches(), "training_data": "foo", "config": config},
        "no data": {"model": make_branches(), "training_data": [], "config": config},
        "an odd mpu": {"model": make_branches(), "mpu": object(), "config": config},
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(UserError) as raised:
            heavylift.initialize(**call)
        messages[name] = str(raised.value)
    return messages


def test_what_cannot_be_done_as_asked_is_said_in_one_line() -> None:
    messages = run_on_ranks(1, refusals_job)[0]
    expected = {
        "used": "model= is sharded already",
        "no model": "model= should be a torch.nn.Module, got NoneType",
        "no config": "no configuration; pass config=",
        "two configs": "given 2 times (config, config_params)",
        "offloaded SGD": "optimizer: SGD cannot run on the host; use torch.optim.AdamW",
        "another's": "10 of its parameters are not the model's",
        "stepped": "it has state from earlier steps",
        "an odd optimizer": "optimizer= should be a torch.optim.Optimizer or a function that makes one, got int",
        "nothing to train": "no parameter has requires_grad",
        "complex": "parameter weight is complex64, and states are float32; make it a real tensor",
        "on meta": "parameter late is on the meta device and has no value",
        "low precision": 'parameters are bfloat16; set "bf16": {"enabled": true}',
        "a tensor": "model_parameters= should be a list of parameters or of groups",
        "in two groups": "a parameter is in more than one group",
        "sequence parallel": "asks for sequence parallelism",
        "an engine": "model= is an engine",
        "a list": "model= is a ModuleList, which has no forward; pass a module whose forward uses what is in it",
        "no parameters": "model_parameters= is empty, or a generator that is used up",
        "empty groups": "model_parameters= is empty, or a generator that is used up",
        "scheduler by name": "lr_scheduler= should be a scheduler or a function of the optimizer that makes one, got",
        "scheduler of another": "lr_scheduler= sets the learning rate of another optimizer",
        "a word of data": "training_data= should be a dataset",
        "no data": "training_data= is empty",
        "an odd mpu": "mpu= should have get_model_parallel_world_size(), got object",
    }
    assert messages.keys() == expected.keys()
    for name, part in expected.items():
        assert part in messages[name], f"{name}: {messages[name]}"
        assert "\n" not in messages[name]


def moments_in_bfloat16_job() -> tuple[dict[str, Any], list[str], list[str]]:
    """`bf16_optimizer_states`: what AdamW, the file's SGD and the script's SGD make of it."""
    config = ds_config(Case("branches", 2, "cpu", "bf16"), dist.get_world_size())
    config["bf16"]["bf16_optimizer_states"] = True
    engine, optimizer, *_ = heavylift.initialize(model=make_branches(), config=config)
    assert isinstance(optimizer, TieredAdamW)
    train(engine, "branches", "bf16", 1)
    weight = engine.module.left.weight
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg_sq")
    utils.safe_set_full_optimizer_state(weight, torch.full_like(moment, 1 / 3), "exp_avg")
    result = {
        "format": optimizer.options.state_format,
        "master": utils.safe_get_full_fp32_param(weight),
        "moment": moment,
        "set": utils.safe_get_full_optimizer_state(weight, "exp_avg").unique().tolist(),
    }
    engine.destroy()
    del config["zero_optimization"]["offload_optimizer"]
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    told = warnings_of(lambda: heavylift.initialize(model=make_branches(), config=config)[0].destroy())
    del config["optimizer"]
    model = make_branches()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    told_own = warnings_of(lambda: heavylift.initialize(model=model, optimizer=own, config=config)[0].destroy())
    return result, told, told_own


def test_moments_in_bfloat16_as_the_configuration_asks() -> None:
    (result, told, told_own), (_, *silent) = run_on_ranks(2, moments_in_bfloat16_job)
    assert result["format"] is StateFormat.BF16
    assert result["moment"].any() and torch.equal(result["moment"], result["moment"].bfloat16().float())
    assert not torch.equal(result["master"], result["master"].bfloat16().float()), "the master is float32"
    assert result["set"] == [torch.tensor(1 / 3).bfloat16().item()]
    why = "no effect: only AdamW's states have a format, and optimizer.type is SGD"
    assert told == [f"bf16.bf16_optimizer_states: {why}"] and silent == [[], []]
    keys = "heavylift.state_format or bf16.bf16_optimizer_states"
    assert told_own == [f"{keys}: no effect with SGD: only AdamW has it"]


def test_an_unknown_keyword_is_pythons_own_error() -> None:
    """As in DeepSpeed and in every other call, before anything happens."""
    with pytest.raises(TypeError, match="initialize\\(\\) got an unexpected keyword argument 'params'$"):
        heavylift.initialize(model=make_branches(), params={})
    assert not dist.is_initialized()
