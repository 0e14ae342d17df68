"""What a step must leave alone, and what the optimizer must notice: lr 0, non-finite gradients, foreign writes,
unused parameters, schedulers. On sharded models and on plain parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step, whole_states, whole_weights
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.config.schema import Schedule, Tier
from heavylift.offload.groups import local_tensor, make_group
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions

STEPS = make_steps(3, VOCAB)
TIERS = [TieredOptions(), TieredOptions(tier=Tier.HOST), TieredOptions(tier=Tier.HOST, ratio=0.37)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


def changed(before: Tensors, after: Tensors) -> list[str]:
    """Names of tensors whose bits differ (-0.0 and 0.0 do)."""
    assert before.keys() == after.keys()
    return [
        n for n in before if not torch.equal(before[n].view(-1).view(torch.uint8), after[n].view(-1).view(torch.uint8))
    ]


# ---- lr 0 ---------------------------------------------------------------------------------------------------------


def zero_lr_job(folder: Path, setup: Setup) -> tuple[Tensors, Tensors, Tensors]:
    """Weights before and after two steps, and the states then. One weight in nine is -0.0."""
    engine = build(folder, setup)
    with torch.no_grad():
        for param in engine.module.parameters():
            assert isinstance(param, DTensor)
            param.to_local().view(-1)[::9] = -0.0
    before = whole_weights(engine)
    for rows in STEPS[:2]:
        take_step(engine, rows, setup.accumulation)
    return before, whole_weights(engine), whole_states(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lr_0_leaves_every_weight_bit_equal(stage: int, dtype: torch.dtype, odd_llama: Path) -> None:
    schedule = ["synchronous", "deferred", "speculative", "auto"][stage]
    setup = Setup(stage=stage, ratio=0.7, schedule=schedule, lr=0.0, dtype=dtype, clip=0.05, accumulation=1 + stage % 2)
    before, after, states = run_on_ranks(2, zero_lr_job, odd_llama, setup)[0]
    assert sum(int((w == 0).logical_and(w.signbit()).sum()) for w in before.values()) > 100
    assert changed(before, after) == []
    moments = [t for name, t in states.items() if name.endswith("exp_avg")]
    assert all(bool(m.any()) for m in moments), "the steps were taken"


# ---- a gradient that is not finite --------------------------------------------------------------------------------


def bad_gradient_job(folder: Path, setup: Setup, bad: float) -> dict[str, Any]:
    """A good step, one in which the last rank's loss is spoilt, a good one again; and the same without the second."""
    engine = build(folder, setup)
    take_step(engine, STEPS[0], setup.accumulation)
    before = {**whole_weights(engine), **whole_states(engine)}
    spoil = dist.get_rank() == dist.get_world_size() - 1
    handle = engine.module.model.norm.register_forward_hook(lambda _m, _a, out: out * bad) if spoil else None
    skipped = take_step(engine, STEPS[1], setup.accumulation)
    after = {**whole_weights(engine), **whole_states(engine)}
    if handle is not None:
        handle.remove()
    num_skipped = engine.optimizer.num_skipped_steps
    last = take_step(engine, STEPS[2], setup.accumulation)
    end = whole_weights(engine)

    other = build(folder, setup)
    take_step(other, STEPS[0], setup.accumulation)
    other_last = take_step(other, STEPS[2], setup.accumulation)
    return {
        "changed_by_skip": changed(before, after),
        "changed_at_end": changed(end, whole_weights(other)),
        "skipped": (skipped.skipped, last.skipped, num_skipped),
        "norm_finite": math.isfinite(skipped.grad_norm),
        "same_loss": last.loss == other_last.loss,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(
    "setup",
    [
        Setup(ratio=0.5, clip=1.0),
        Setup(tier="device"),
        Setup(stage=1, accumulation=2),
        Setup(accumulation=2, clip=1.0),
        Setup(ratio=0.5, clip=1.0, schedule="deferred"),
        Setup(accumulation=2, schedule="deferred"),
    ],
    ids=["host", "device", "stage1-accumulation", "accumulation", "deferred", "deferred-accumulation"],
)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    setup: Setup, bad: float, odd_llama: Path
) -> None:
    for result in run_on_ranks(2, bad_gradient_job, odd_llama, setup, bad):
        assert not result["norm_finite"]
        assert result["skipped"] == (True, False, 1)
        assert result["changed_by_skip"] == []
        assert result["same_loss"] and result["changed_at_end"] == [], "the step after a skip is as if it had not been"


# ---- weights written by others ------------------------------------------------------------------------------------


def foreign_write_job(folder: Path, other_folder: Path, setup: Setup) -> list[str]:
    """Weights of another file copied into the shards after a step; compared with a run that starts from that file."""
    from heavylift.models.load import load_weights

    engine = build(folder, setup)
    take_step(engine, STEPS[0])
    # what the optimizer has learnt so far would differ: both continue from the same moments
    moments = copy.deepcopy(engine.optimizer.state_dict())
    load_weights(engine.module, other_folder)
    take_step(engine, STEPS[1])
    written = whole_weights(engine)

    fresh = build(other_folder, setup)
    for index, param in enumerate(fresh.module.parameters()):
        local_tensor(moments["state"][index]["master"]).copy_(local_tensor(param))
    fresh.optimizer.load_state_dict(moments)
    take_step(fresh, STEPS[1])
    return changed(written, whole_weights(fresh))


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_follow_weights_written_between_steps(stage: int, odd_llama: Path, tmp_path: Path) -> None:
    other = save_odd_llama(tmp_path / "other", tied=False, std=0.5)
    for result in run_on_ranks(2, foreign_write_job, odd_llama, other, Setup(stage=stage, ratio=0.5)):
        assert result == []


@pytest.mark.parametrize("options", TIERS, ids=["device", "host", "part"])
def test_masters_follow_load_state_dict_of_the_module(options: TieredOptions) -> None:
    model, twin = pair_of_models()
    ours, torchs = adamw_pair(model, twin, options)
    new = {name: torch.randn_like(t) for name, t in model.state_dict().items()}
    for module in (model, twin):
        module.load_state_dict(new)
    for _ in range(2):
        step_both(model, twin, ours, torchs)
    assert_close(model, twin)


# ---- plain parameters against torch.optim.AdamW -------------------------------------------------------------------


class TwoBranches(nn.Module):
    """A layer that is only used when asked for, as an expert or an auxiliary head is."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(7, 5)
        self.sometimes = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        hidden = self.always(x)
        return (self.sometimes(hidden) if branch else hidden) * self.scale


def pair_of_models() -> tuple[TwoBranches, TwoBranches]:
    torch.manual_seed(0)
    model = TwoBranches()
    return model, copy.deepcopy(model)


def adamw_pair(
    model: nn.Module, twin: nn.Module, options: TieredOptions, lr: float = 1e-2
) -> tuple[TieredAdamW, torch.optim.AdamW]:
    kinds = [
        [{"params": [p for p in m.parameters() if (p.ndim >= 2) == wide]} for wide in (True, False)]
        for m in (model, twin)
    ]
    for groups in kinds:
        groups[0]["weight_decay"] = 0.1
        groups[1] |= {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0}
    return TieredAdamW(kinds[0], lr=lr, options=options), torch.optim.AdamW(kinds[1], lr=lr, foreach=False)


def step_both(model: nn.Module, twin: nn.Module, *optimizers: torch.optim.Optimizer, branch: bool = True) -> None:
    x = torch.randn(6, 7)
    for module, optimizer in zip((model, twin), optimizers, strict=True):
        module(x, branch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    """Within a few units in the last place: the arithmetic has torch's order, but torch may fuse operations."""
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", TIERS, ids=["device", "host", "part"])
def test_an_unused_parameter_takes_no_step(options: TieredOptions) -> None:
    model, twin = pair_of_models()
    ours, torchs = adamw_pair(model, twin, options)
    for branch in (False, True, False, True, True):
        before = model.sometimes.weight.detach().clone()
        step_both(model, twin, ours, torchs, branch=branch)
        assert torch.equal(before, model.sometimes.weight) is not branch
        assert_close(model, twin)
    steps, torchs_steps = (
        {index: int(entry["step"]) for index, entry in optimizer.state_dict()["state"].items()}
        for optimizer in (ours, torchs)
    )
    assert steps == torchs_steps
    assert set(steps.values()) == {3, 5}


@pytest.mark.parametrize("options", TIERS, ids=["device", "host", "part"])
def test_schedulers_and_edited_groups_are_obeyed_at_once(options: TieredOptions) -> None:
    model, twin = pair_of_models()
    optimizers = adamw_pair(model, twin, options)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8) for o in optimizers]
    for step in range(6):
        if step == 3:
            for optimizer in optimizers:
                optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.7, 0.9))
                optimizer.param_groups[1]["eps"] = 1e-3
        step_both(model, twin, *optimizers)
        assert_close(model, twin)
        for scheduler in schedulers:
            scheduler.step()


def test_clipping_is_torchs_formula() -> None:
    model, twin = pair_of_models()
    ours, torchs = adamw_pair(model, twin, TieredOptions(tier=Tier.HOST, max_grad_norm=0.01))
    for _ in range(3):
        x = torch.randn(6, 7)
        for module in (model, twin):
            module(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        for optimizer in (ours, torchs):
            optimizer.step()
            optimizer.zero_grad()
        assert float(norm) > 0.01
        assert ours.grad_norm == pytest.approx(float(norm), rel=1e-6)
    assert_close(model, twin)


def test_the_closure_is_run_and_its_loss_returned() -> None:
    model, _ = pair_of_models()
    optimizer = TieredAdamW(model.parameters(), options=TieredOptions(tier=Tier.HOST))
    before = model.always.weight.detach().clone()

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 7)).sum()
        loss.backward()
        return float(loss.detach())

    expected = float(model(torch.ones(2, 7)).sum().detach())
    assert optimizer.step(closure) == expected
    assert not torch.equal(before, model.always.weight)


def test_late_parameter_groups_are_refused() -> None:
    model, _ = pair_of_models()
    optimizer = TieredAdamW(model.always.parameters())
    with pytest.raises(RuntimeError, match="all parameter groups at construction"):
        optimizer.add_param_group({"params": list(model.sometimes.parameters())})


# ---- what cannot be stepped with ----------------------------------------------------------------------------------


def plain(*dtypes: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in dtypes]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lr": -1.0}, "parameter group 0: lr should be at least 0, got -1.0"),
        ({"lr": math.nan}, "parameter group 0: lr should be at least 0, got nan"),
        ({"eps": -1e-8}, "parameter group 0: eps should be at least 0, got -1e-08"),
        ({"weight_decay": -0.1}, "parameter group 0: weight_decay should be at least 0, got -0.1"),
        ({"betas": (0.9, 1.0)}, r"group 0: betas should be two numbers, at least 0 and below 1, got \(0.9, 1.0\)"),
    ],
)
def test_hyperparameters_are_checked_at_construction_and_before_each_step(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TieredAdamW(plain(torch.float32), **asked)
    for schedule in (Schedule.SYNCHRONOUS, Schedule.DEFERRED, Schedule.SPECULATIVE):
        (param,) = params = plain(torch.float32)
        optimizer = TieredAdamW(params, options=TieredOptions(Tier.HOST, schedule=schedule))
        good = {**optimizer.param_groups[0]}
        optimizer.param_groups[0].update(asked)
        with pytest.raises(ValueError, match=said):
            param.square().sum().backward()
            optimizer.step()
        assert torch.equal(param.detach(), torch.ones(8))
        optimizer.param_groups[0].update(good)
        optimizer.zero_grad()
        param.square().sum().backward()
        optimizer.step()
        assert not torch.equal(param.detach(), torch.ones(8))
        optimizer.close()


def test_parameters_that_one_optimizer_cannot_serve_are_named() -> None:
    wide, narrow = mixed = plain(torch.float32, torch.bfloat16)
    group = make_group("layer", [("weight", wide)])
    assert group is not None
    host = TieredOptions(Tier.HOST)
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: TieredAdamW(mixed, options=host),
            "of bfloat16 and float32 cannot share the host tier; make",
        ),
        (
            lambda: TieredAdamW(mixed, groups=[group]),
            "1 of 2 trained parameters are in none of them, one of shape",
        ),
        (
            lambda: TieredAdamW([narrow], groups=[group]),
            "1 of 1 parameters are in no parameter group, weight of",
        ),
        (
            lambda: make_group("layer", [("a", wide), ("b", narrow)]),
            "group layer: its trainable parameters should",
        ),
    ]
    for make, said in cases:
        with pytest.raises(ValueError, match=said) as caught:
            make()
        assert "\n" not in str(caught.value)
    TieredAdamW(mixed).close()


# ---- without bias correction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", TIERS, ids=["device", "host", "ratio"])
def test_without_bias_correction_the_moments_are_used_as_they_are(options: TieredOptions) -> None:
    grads = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    param = nn.Parameter(torch.linspace(-1, 1, 50))
    p, m, v = param.detach().double(), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    optimizer = TieredAdamW([param], lr=1e-2, weight_decay=0.1, bias_correction=False, options=options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad.double() ** 2
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(param.detach().double(), p, rtol=1e-5, atol=1e-6)
    optimizer.close()


def test_a_state_of_before_that_key_is_loaded() -> None:
    optimizer = TieredAdamW([nn.Parameter(torch.ones(3))])
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["bias_correction"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["bias_correction"] is True
