"""`zero_grad()` forgets what backward has left since the last step, wherever it waits; after a step it is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks.gather import whole
from ranks.pool import run_on_ranks
from ranks.schedules import slow_down
from torch import nn

import heavylift
from heavylift.api.parameters import safe_get_full_fp32_param, safe_get_full_grad
from heavylift.config.schema import Schedule, Tier
from heavylift.offload.additions import HostAdditions
from heavylift.offload.gates import Gate
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.worker import Worker

Tensors = dict[str, torch.Tensor]


class Forked(nn.Module):
    """A part that only some batches use: a gradient of it that should be forgotten would show in its step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head, self.spare = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        y = self.trunk(x).tanh()
        return (self.head(y) + (100 * self.spare(y) if bad else 0)).square().mean()


@dataclass(frozen=True)
class Case:
    """An engine, and who is asked to forget."""

    schedule: str
    """Of offloaded states, or `device` and `momentum` without offload."""
    stage: int = 3
    accumulation: int = 1
    precision: str = "bf16"
    by: str = "engine"

    @property
    def exact(self) -> bool:
        """A step that backward has taken is taken back but for rounding."""
        return self.schedule not in ("speculative", "auto") or self.accumulation > 1


def make(case: Case) -> Any:
    zero: dict[str, Any] = {"stage": case.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    if case.schedule == "momentum":
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}
    elif case.schedule != "device":
        zero["offload_optimizer"] = {"device": "cpu", "ratio": 0.7}
        config["heavylift"] = {"schedule": case.schedule}
    if case.precision != "fp32":
        config[case.precision] = {"enabled": True}
    engine = heavylift.initialize(model=Forked(), config=config)[0]
    if isinstance(engine.optimizer, TieredAdamW):
        slow_down(engine.optimizer, 0.002)
    return engine


def backward(engine: Any, index: int, bad: bool = False) -> None:
    x = torch.linspace(-1, 1, 20).roll(index).view(4, 5) + dist.get_rank()
    engine.backward(engine(x.to(engine.module.head.weight.dtype), bad=bad).float())


def train(engine: Any, case: Case, before: Callable[[], Any], num_steps: int = 3) -> list[float]:
    """Steps on good batches; `before` each of them. The gradient norms."""
    norms = []
    for index in range(num_steps):
        before()
        for micro in range(case.accumulation):
            backward(engine, index + micro)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def state(engine: Any) -> Tensors:
    engine.settle()
    params = dict(engine.module.named_parameters())
    masters = {f"master.{name}": safe_get_full_fp32_param(p) for name, p in params.items()}
    found = {name: whole(p) for name, p in params.items()} | {n: t for n, t in masters.items() if t is not None}
    if isinstance(engine.optimizer, TieredAdamW):
        segments = [s for group in engine.optimizer.groups for s in group.segments]
        found |= {f"steps.{s.name}": torch.tensor(s.num_steps) for s in segments}
    return found


def forgets_job(case: Case) -> list[str]:
    """With gradients of bad batches that are forgotten, beside without."""
    outcomes = []
    for forgets in (False, True):
        engine = make(case)
        zero_grad = engine.zero_grad if case.by == "engine" else engine.optimizer.zero_grad
        left: list[Any] = []

        def forget(engine: Any = engine, zero_grad: Any = zero_grad, left: list[Any] = left) -> None:
            backward(engine, 5, bad=True)
            zero_grad()
            left += [safe_get_full_grad(p) for p in engine.module.parameters()]

        norms = train(engine, case, forget if forgets else lambda: None)
        outcomes.append((norms, state(engine)))
        assert all(grad is None for grad in left)
        engine.destroy()
    (norms, expected), (found_norms, found) = outcomes
    if case.exact:
        wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
        return wrong + ([] if norms == found_norms else [f"norms {norms} {found_norms}"])
    wrong = [n for n in expected if not torch.allclose(expected[n].float(), found[n].float(), rtol=1e-5, atol=1e-6)]
    return wrong + ([] if norms == pytest.approx(found_norms, rel=1e-4) else [f"norms {norms} {found_norms}"])


CASES = [
    Case("synchronous"),
    Case("deferred"),
    Case("deferred", precision="fp32", by="optimizer"),
    Case("speculative", precision="fp32"),
    Case("auto", precision="fp32", by="optimizer"),
    Case("device"),
    Case("momentum"),
    Case("synchronous", 2, 2),
    Case("deferred", 3, 2, by="optimizer"),
    Case("deferred", 1, 2, "fp32"),
    Case("device", 1, 2, "fp32", by="optimizer"),
    Case("device", 0, 2, "fp32"),
    Case("momentum", 1, 2, "fp32"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.schedule}-{c.stage}-{c.accumulation}-{c.precision}-{c.by}")
def test_what_is_forgotten_leaves_no_trace(case: Case) -> None:
    assert run_on_ranks(2, forgets_job, case) == [[], []]


def unreduced_job() -> list[bool]:
    """bfloat16 gradients that FSDP2 keeps in float32 on their rank between micro-batches."""
    from parity_api.models import MAKERS, dealt, micro_batches

    outcomes = []
    for forgets in (False, True):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
        }
        engine = heavylift.initialize(model=MAKERS["llama"](), config=config)[0]
        batches = list(dealt(micro_batches("llama", 4, torch.bfloat16)[0], dist.get_rank(), 2))
        if forgets:
            engine.backward(100 * engine(**batches[1])["loss"])
            assert engine.has_unreduced_gradients()
            engine.zero_grad()
            assert not engine.has_unreduced_gradients()
        for batch in batches:
            engine.backward(engine(**batch)["loss"])
            engine.step()
        outcomes.append((engine.get_global_grad_norm(), {n: whole(p) for n, p in engine.module.named_parameters()}))
        engine.destroy()
    (norm, expected), (found_norm, found) = outcomes
    return [norm == found_norm, all(torch.equal(expected[name], found[name]) for name in expected)]


def test_gradients_that_are_not_reduced_yet_are_forgotten_too() -> None:
    assert run_on_ranks(2, unreduced_job) == [[True, True]] * 2


def habits_job(case: Case) -> dict[str, Any]:
    """`zero_grad()` where plain loops have it: after step(), before forward, between forward and backward."""
    outcomes, waits = [], []
    counted = [(Gate, "wait"), (Worker, "drain"), (HostAdditions, "settle")]

    def quietly(zero_grad: Callable[[], None]) -> None:
        found: list[str] = []
        patches = [patch.object(kind, name, lambda *_, name=name: found.append(name)) for kind, name in counted]
        for each in patches:
            each.start()
        try:
            zero_grad()
        finally:
            for each in patches:
                each.stop()
        waits.extend(found)

    for habit in ("none", "after", "before", "between"):
        engine = make(case)
        for index in range(3):
            if habit == "before":
                quietly(engine.optimizer.zero_grad)
            for micro in range(case.accumulation):
                x = torch.linspace(-1, 1, 20).roll(index + micro).view(4, 5) + dist.get_rank()
                loss = engine(x.to(engine.module.head.weight.dtype)).float()
                if habit == "between" and micro == 0:
                    quietly(engine.zero_grad)
                engine.backward(loss)
                engine.step()
            if habit == "after":
                quietly(engine.zero_grad)
                quietly(engine.optimizer.zero_grad)
        outcomes.append(state(engine))
        engine.destroy()
    first, *others = outcomes
    return {"same": [all(torch.equal(first[n], other[n]) for n in first) for other in others], "waits": waits}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("schedule", ["synchronous", "deferred", "speculative", "auto"])
def test_the_habits_of_a_plain_loop_change_nothing_and_wait_for_nothing(schedule: str, accumulation: int) -> None:
    for found in run_on_ranks(2, habits_job, Case(schedule, accumulation=accumulation)):
        assert found == {"same": [True] * 3, "waits": []}


def load_job(folder: Path, case: Case) -> list[float]:
    """A checkpoint is loaded when a step has half begun."""
    engine = make(case)
    engine.save_checkpoint(folder, tag=case.schedule)
    clean = train(engine, case, lambda: None, 2)
    expected = state(engine)
    engine.destroy()
    engine = make(case)
    train(engine, case, lambda: None, 1)
    backward(engine, 5, bad=True)
    engine.load_checkpoint(folder, tag=case.schedule)
    again = train(engine, case, lambda: None, 2)
    found = state(engine)
    engine.destroy()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    return [clean[0] - again[0], clean[1] - again[1]]


@pytest.mark.parametrize(
    "case", [Case("deferred", 2, 2), Case("deferred"), Case("speculative"), Case("momentum", 2, 2)]
)
def test_loading_a_checkpoint_forgets_a_step_that_has_begun(case: Case, tmp_path: Path) -> None:
    assert run_on_ranks(2, load_job, tmp_path, case) == [[0.0, 0.0]] * 2


def refused_job() -> str:
    engine = make(Case("deferred"))
    backward(engine, 1)
    engine.optimizer.zero_grad()
    with pytest.raises(heavylift.UserError) as caught:
        engine.step()
    engine.destroy()
    engine.optimizer.zero_grad()  # as torch's: nothing is left, and nothing is refused
    return str(caught.value)


def test_a_step_after_forgetting_has_no_backward() -> None:
    for message in run_on_ranks(2, refused_job):
        assert message.startswith("step: no backward since the last step")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("schedule", ["synchronous", "deferred", "speculative"])
def test_without_an_engine(schedule: str, accumulate: bool) -> None:
    runs = []
    for forgets in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40)) for _ in range(3)]
        options = TieredOptions(Tier.HOST, ratio=0.6, schedule=Schedule(schedule), accumulate=accumulate)
        optimizer = TieredAdamW(params, lr=1e-2, weight_decay=0.1, options=options)
        for step in range(3):
            if forgets:
                sum((5 * p).square().sum() for p in params[: 1 + step]).backward()
                optimizer.zero_grad()
            sum((p - step).square().sum() for p in params[:2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([p.detach().clone() for p in params])
        optimizer.close()
    exact = schedule != "speculative" or accumulate
    for expected, found in zip(*runs, strict=True):
        assert torch.equal(expected, found) if exact else torch.allclose(expected, found, atol=1e-6)
