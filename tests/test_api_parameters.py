"""`utils.safe_*`: values, gradients and moments of single parameters, read and set, whatever the schedule and stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.gather import whole
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import Rows, loss_sum, make_steps, micro_batches
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step, whole_weights
from torch import nn
from torch.distributed.tensor import DTensor

import heavylift
from heavylift.api import parameters as utils
from heavylift.api import zero
from heavylift.api.gathering import WholeParameter
from heavylift.api.owners import register_optimizer
from heavylift.config.schema import Schedule, Tier
from heavylift.engine import Engine
from heavylift.errors import UserError
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions

STEPS = make_steps(4, VOCAB)
HOST = Tier.HOST
WAYS = {
    "device": TieredOptions(),
    "synchronous": TieredOptions(HOST, 0.6),
    "deferred": TieredOptions(HOST, 0.6, Schedule.DEFERRED),
    "deferred whole": TieredOptions(HOST, 1.0, Schedule.DEFERRED),
    "accumulated": TieredOptions(HOST, 0.6, Schedule.DEFERRED, accumulate=True),
    "speculative": TieredOptions(HOST, 0.6, Schedule.SPECULATIVE),
}
EXACT = [name for name in WAYS if name != "speculative"]


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


def make(way: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, TieredAdamW]:
    """A small model on one process, and its optimizer, registered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    optimizer = TieredAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, options=WAYS[way])
    register_optimizer(optimizer)
    return model, optimizer


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = model[0].weight.dtype  # type: ignore[union-attr]
    model(torch.randn(4, 7, generator=generator).to(dtype)).float().square().mean().backward()


def twin_of(model: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    """The same model for torch's optimizer."""
    twin = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    twin.load_state_dict(model.state_dict())
    return twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


@pytest.mark.parametrize("way", WAYS)
def test_getters_give_what_torchs_optimizer_has(way: str) -> None:
    model, optimizer = make(way)
    twin, twin_optimizer = twin_of(model)
    for step in range(3):
        backward(model, step)
        backward(twin, step)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(utils.safe_get_full_grad(param), other.grad)
        optimizer.step()
        optimizer.zero_grad()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert utils.safe_get_full_grad(param) is None
            torch.testing.assert_close(utils.safe_get_full_fp32_param(param), other.detach(), rtol=0, atol=1e-7)
            for name in utils.MOMENTS:
                theirs = twin_optimizer.state[other][name]
                ours = utils.safe_get_full_optimizer_state(param, name)
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
                assert torch.equal(utils.safe_get_local_optimizer_state(param, name), ours.reshape(-1))
    optimizer.close()


@pytest.mark.parametrize("way", EXACT)
def test_a_gradient_that_is_set_is_the_one_that_is_stepped(way: str) -> None:
    """Norm included: the step equals that of a model whose gradient was scaled in autograd."""
    results = []
    for by_setter in (True, False):
        model, optimizer = make(way)
        weight = model[0].weight
        if by_setter:
            backward(model, 0)
            grad = utils.safe_get_full_grad(weight)
            utils.safe_set_full_grad(weight, grad * 4)
        else:
            handle = weight.register_hook(lambda g: g * 4)
            backward(model, 0)
            handle.remove()
        optimizer.step()
        optimizer.synchronize()
        results.append((optimizer.grad_norm, [p.detach().clone() for p in model.parameters()]))
        optimizer.close()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_are_set_are_stepped_from(way: str, dtype: torch.dtype) -> None:
    """Two models, one steps on, the other is set to its states: the next step of both is the same, to the bit."""
    model, optimizer = make(way, dtype)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    other, other_optimizer = make(way, dtype)
    for step in range(2):
        backward(other, step + 7)
        other_optimizer.step()
        other_optimizer.zero_grad()
    for param, target in zip(model.parameters(), other.parameters(), strict=True):
        value = utils.safe_get_full_fp32_param(param)
        assert value is not None and value.dtype == torch.float32
        utils.safe_set_full_fp32_param(target, value)
        assert torch.equal(target, param)
        for name in utils.MOMENTS:
            utils.safe_set_full_optimizer_state(target, utils.safe_get_full_optimizer_state(param, name), name)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        backward(m, 5)
        o.step()
        o.synchronize()
    for param, target in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, target)
        assert torch.equal(utils.safe_get_full_fp32_param(param), utils.safe_get_full_fp32_param(target))
    optimizer.close()
    other_optimizer.close()


def test_a_step_taken_in_backward_is_not_written_into() -> None:
    model, optimizer = make("speculative")
    backward(model, 0)
    weight = model[0].weight
    for write in (
        lambda: utils.safe_set_full_grad(weight, torch.zeros(5, 7)),
        lambda: utils.safe_set_full_fp32_param(weight, torch.zeros(5, 7)),
        lambda: utils.safe_set_local_optimizer_state(weight, torch.zeros(35), "exp_avg"),
    ):
        with pytest.raises(UserError, match=r"schedule speculative has taken the step .* take schedule deferred"):
            write()
    with pytest.raises(RuntimeError, match="cannot load states between backward and step"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    utils.safe_set_full_fp32_param(weight, torch.zeros(5, 7))
    assert not weight.any()
    optimizer.close()


def test_a_vectorised_update_and_parameters_without_gradient() -> None:
    model, optimizer = make("deferred")
    backward(model, 0)
    before = [utils.safe_get_full_grad(p) for p in model.parameters()]
    seen: list[nn.Parameter] = []

    def halve(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        seen.append(param)
        return grad / 2

    utils.safe_update_full_grad_vectorized(list(model.parameters()), halve)
    assert len(seen) == 4
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(utils.safe_get_full_grad(param), grad / 2)
    optimizer.step()
    utils.safe_update_full_grad_vectorized(list(model.parameters()), halve)
    assert len(seen) == 4  # nobody has a gradient now
    optimizer.close()


def test_what_is_not_there() -> None:
    model, optimizer = make("device")
    stranger = nn.Parameter(torch.zeros(3))
    assert utils.safe_get_full_fp32_param(stranger) is None
    assert utils.safe_get_local_grad(stranger) is None
    with pytest.raises(UserError, match="no engine trains this parameter"):
        utils.safe_set_full_fp32_param(stranger, torch.ones(3))
    weight = model[0].weight
    with pytest.raises(UserError, match=r"optim_state_key: expected one of exp_avg, exp_avg_sq, got 'momentum'"):
        utils.safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(UserError, match=r"expected the whole parameter's shape \(5, 7\), got \(7, 5\)"):
        utils.safe_set_full_fp32_param(weight, torch.zeros(7, 5))
    with pytest.raises(UserError, match="expected this rank's 35 elements, got 3"):
        utils.safe_set_local_fp32_param(weight, torch.zeros(3))
    with pytest.raises(UserError, match="no gradient to set"):
        utils.safe_set_full_grad(weight, torch.zeros(5, 7))
    optimizer.close()


def test_an_optimizer_of_torch_is_read_and_set_too() -> None:
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.Adam([param], lr=0.1)
    register_optimizer(optimizer)
    param.square().sum().backward()
    assert torch.equal(utils.safe_get_full_grad(param), torch.tensor([2.0, 4.0]))
    assert utils.safe_get_full_optimizer_state(param, "exp_avg") is None  # not before the first step
    optimizer.step()
    torch.testing.assert_close(utils.safe_get_full_optimizer_state(param, "exp_avg"), torch.tensor([0.2, 0.4]))
    utils.safe_set_full_fp32_param(param, torch.tensor([5.0, 6.0]))
    assert param.tolist() == [5.0, 6.0]


def test_an_optimizer_that_is_gone_is_forgotten() -> None:
    param = nn.Parameter(torch.zeros(2))
    register_optimizer(torch.optim.SGD([param], lr=0.1))
    assert utils.safe_get_full_fp32_param(param) is None


# ---- on ranks -------------------------------------------------------------------------------------------------------


def mean_gradients(engine: Engine, rows: Rows) -> dict[str, torch.Tensor]:
    """Of the whole step, on one process that has the whole weights: the plain way."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(engine.module.config)
    plain.load_state_dict(whole_weights(engine), strict=True)
    (loss_sum(plain, rows) / rows.num_trained).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def backward_only(engine: Engine, rows: Rows) -> None:
    engine.module.train()
    engine.sharded.set_last_micro_batch(True)
    (mine,) = micro_batches(rows, dist.get_rank(), dist.get_world_size(), 1)
    (loss_sum(engine.module, mine) / rows.num_trained).backward()


def sharded_job(folder: Path, setup: Setup) -> list[str]:
    """What does not agree with gathering by hand and with a plain model; empty when all is well."""
    engine = build(folder, setup)
    register_optimizer(engine.optimizer)
    wrong: list[str] = []
    take_step(engine, STEPS[0])
    plain = mean_gradients(engine, STEPS[1])
    backward_only(engine, STEPS[1])
    for name, param in engine.module.named_parameters():
        grad = utils.safe_get_full_grad(param)
        if grad is None or not torch.allclose(grad, plain[name], rtol=1e-4, atol=1e-6):
            wrong.append(f"gradient of {name}")
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    states = engine.optimizer.state_dict()["state"]
    for index, (name, param) in enumerate(engine.module.named_parameters()):
        for key, get in _getters(param).items():
            if not torch.equal(get(), whole(states[index][key])):
                wrong.append(f"{key} of {name}")
        local = utils.safe_get_local_fp32_param(param)
        part = param.to_local() if isinstance(param, DTensor) else param
        if local.shape != (part.numel(),) or not torch.equal(local, part.detach().reshape(-1)):
            wrong.append(f"shard of {name}")
    wrong += _set_everything(engine)
    engine.optimizer.close()
    return wrong


def _getters(param: nn.Parameter) -> dict[str, Callable[[], torch.Tensor | None]]:
    return {
        "master": lambda: utils.safe_get_full_fp32_param(param),
        "exp_avg": lambda: utils.safe_get_full_optimizer_state(param, "exp_avg"),
        "exp_avg_sq": lambda: utils.safe_get_full_optimizer_state(param, "exp_avg_sq"),
    }


def _set_everything(engine: Engine) -> list[str]:
    wrong = []
    generator = torch.Generator().manual_seed(3)
    for name, param in engine.module.named_parameters():
        value = torch.randn(param.shape, generator=generator)
        utils.safe_set_full_fp32_param(param, value)
        utils.safe_set_full_optimizer_state(param, value.square(), "exp_avg_sq")
        if not torch.equal(whole(param), value) or not torch.equal(utils.safe_get_full_fp32_param(param), value):
            wrong.append(f"set {name}")
        if not torch.equal(utils.safe_get_full_optimizer_state(param, "exp_avg_sq"), value.square()):
            wrong.append(f"set exp_avg_sq of {name}")
    return wrong


OFFLOADED = Setup(stage=3, schedule="deferred", ratio=0.7)


@pytest.mark.parametrize("setup", [OFFLOADED, Setup(stage=2, tier="device"), Setup(stage=0, ratio=0.5)])
def test_on_two_ranks(odd_llama: Path, setup: Setup) -> None:
    assert run_on_ranks(2, sharded_job, odd_llama, setup) == [[], []]


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 4])
def test_on_other_ranks(odd_llama: Path, world_size: int) -> None:
    assert run_on_ranks(world_size, sharded_job, odd_llama, OFFLOADED) == [[]] * world_size


# ---- through initialize() --------------------------------------------------------------------------------------------


def engine_job(settings: dict[str, Any]) -> list[str]:
    """Gradients are unscaled means over ranks, masters float32, whatever steps them; what is set is stepped from."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    twin = copy.deepcopy(net)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, **settings}
    engine, *_ = heavylift.initialize(model=net, config=config)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * dist.get_world_size(), 6, generator=generator)
    mine = inputs[4 * dist.get_rank() :][:4].to(next(engine.module.parameters()).dtype)
    engine.backward(engine(mine).float().square().mean())
    twin(inputs).square().mean().backward()
    wrong = []
    masters = []
    tolerance = 1e-6 if engine.precision == "float32" else 2e-2
    for (name, param), other in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
        grad = utils.safe_get_full_grad(param)
        if not torch.allclose(grad, other.grad, atol=tolerance, rtol=tolerance):
            wrong.append(f"gradient of {name}")
        if not torch.equal(utils.safe_get_full_fp32_param(param), other.detach()):
            wrong.append(f"{name}: the master is not the float32 value from before rounding")
        utils.safe_set_full_grad(param, torch.ones_like(grad))
        masters.append(utils.safe_get_full_fp32_param(param))
        with zero.GatheredParameters(param, modifier_rank=0):
            if not isinstance(param, WholeParameter):
                wrong.append(f"{name} is not gathered")
            with pytest.raises(UserError, match="the parameter is gathered by GatheredParameters"):
                utils.safe_get_full_fp32_param(param)
        if not torch.equal(utils.safe_get_full_fp32_param(param), masters[-1]):
            wrong.append(f"{name}: looking at it has cost precision")
    engine.step()
    for (name, param), before in zip(engine.module.named_parameters(), masters, strict=True):
        moved = before - utils.safe_get_full_fp32_param(param)
        if not torch.allclose(moved, torch.full_like(moved, 0.5), atol=1e-3):  # a step along ones, lr 0.5
            wrong.append(f"step of {name}: {moved.flatten()[:3]}")
        utils.safe_set_full_fp32_param(param, before)
        if not torch.equal(whole(param).float(), before.to(param.dtype).float()):
            wrong.append(f"{name} does not follow")
    engine.destroy()
    return wrong


ADAMW = {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.0}}
SGD = {"type": "SGD", "params": {"lr": 0.5}}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.6}}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": ADAMW, "zero_optimization": OFFLOAD, "fp16": {"enabled": True, "initial_scale_power": 8}},
        {"optimizer": SGD, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        {"optimizer": SGD, "zero_optimization": {"stage": 1}},
    ],
)
def test_engines_of_every_precision(settings: dict[str, Any]) -> None:
    assert run_on_ranks(2, engine_job, settings) == [[], []]
