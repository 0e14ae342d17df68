"""Runs whose steps are disturbed on purpose: a slow worker, gradients that go bad or spike, gates that are not there.

    outcome = observe(engine, steps, Disturbance(host_step_s=0.003, bad="late", at=2))

An `Outcome` holds the bits of this rank's shards and states; `compare` says what differs between two of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from heavylift.engine import Engine
from heavylift.offload.groups import local_tensor
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.pieces import Operation
from ranks.plain import Rows
from ranks.sharded import Setup, build, take_step

SPIKE = 1000.0
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Disturbance:
    """What is done to a run."""

    host_step_s: float = 0.0
    """Seconds that every step of a host part takes longer: mistakes of order then show."""
    bad: str = ""
    """`all`: every gradient of the last rank is NaN in step `at`; `late`: those of the first layer and of what lies
    before it, so that others have been stepped by then; `spike`: every rank's gradients are `SPIKE` times as large."""
    at: int = -1
    gated: bool = True
    """False: nothing in a forward waits for the worker."""


@dataclass
class Outcome:
    """What a run did, on this rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    speculated: list[bool] = field(default_factory=list)
    """Of each step, whether it was taken during backward."""
    operations: Counter[Operation] = field(default_factory=Counter)
    """How many parts on the host were stepped, corrected, taken back."""
    tensors: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Between two runs; on this rank."""

    tensors: tuple[str, ...]
    """Names of shards and states whose bits differ."""
    losses: bool
    skipped: bool
    norm: float
    """Largest relative difference of the gradient norms that are finite."""


def slow_down(optimizer: TieredAdamW, host_step_s: float) -> Counter[Operation]:
    """Makes every step of a host part take longer; returns a counter of what is done from now on."""
    counts = Counter[Operation]()

    def slowed(run: Callable[..., None]) -> Callable[..., None]:
        def slow(part: Any, steps: Any, grads: Any, operation: Operation = Operation.STEP, *rest: Any) -> None:
            time.sleep(host_step_s)
            counts[operation] += 1
            run(part, steps, grads, operation, *rest)

        return slow

    stepper, streamed = optimizer._stepper, optimizer._streamed
    stepper.step_host_part = slowed(stepper.step_host_part)  # type: ignore[method-assign]
    if streamed is not None:
        streamed.run = slowed(streamed.run)  # type: ignore[method-assign]
    return counts


def without_gates() -> Any:
    """Context in which optimizers are built whose gates nobody waits at in a forward."""
    return patch("heavylift.offload.optimizer.install_gate", lambda *_: None)


@contextmanager
def disturbed(module: nn.Module, kind: str) -> Iterator[None]:
    """Gradients of the passes inside are bad: see `Disturbance.bad`."""
    factor = SPIKE if kind == "spike" else math.nan
    if kind != "spike" and dist.get_rank() != dist.get_world_size() - 1:
        yield
        return
    where = module.model.layers[0] if kind == "late" else module.lm_head

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * factor)

    handle = where.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def local_tensors(engine: Engine) -> Tensors:
    """Copies of this rank's shards and states, on the CPU; waits for what is under way."""
    engine.optimizer.synchronize()
    tensors = {name: local_tensor(p).cpu().clone() for name, p in engine.module.named_parameters()}
    for index, entry in engine.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": local_tensor(t).clone() for name, t in entry.items()}
    return tensors


def observe(
    engine: Engine,
    steps: Sequence[Rows],
    accumulation: int,
    disturbance: Disturbance,
    after_step: Callable[[int], None] = lambda _: None,
    close: bool = True,
) -> Outcome:
    """Takes the steps, closes the optimizer (unless it goes on) and says what happened."""
    optimizer, outcome = engine.optimizer, Outcome()
    outcome.operations = slow_down(optimizer, disturbance.host_step_s)
    for index, rows in enumerate(steps):
        speculates = optimizer._overlap is not None and optimizer._accumulation is None and optimizer._speculates()
        outcome.speculated.append(speculates)
        with disturbed(engine.module, disturbance.bad) if index == disturbance.at else nullcontext():
            result = take_step(engine, rows, accumulation)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        outcome.skipped.append(result.skipped)
        after_step(index)
    outcome.tensors = local_tensors(engine)
    if close:
        optimizer.close()
    return outcome


def run(folder: Path, setup: Setup, steps: Sequence[Rows], disturbance: Disturbance = Disturbance()) -> Outcome:
    """`observe` for a model folder, on the ranks of a pool. A collective."""
    with nullcontext() if disturbance.gated else without_gates():
        engine = build(folder, setup)
    return observe(engine, steps, setup.accumulation, disturbance)


def compare(a: Outcome, b: Outcome) -> Difference:
    """What differs between two runs of equally many steps."""
    assert a.tensors.keys() == b.tensors.keys(), a.tensors.keys() ^ b.tensors.keys()
    pairs = [(x, y) for x, y in zip(a.norms, b.norms, strict=True) if math.isfinite(x)]
    return Difference(
        tensors=tuple(name for name in a.tensors if not same_bits(a.tensors[name], b.tensors[name])),
        losses=a.losses != b.losses,
        skipped=a.skipped != b.skipped,
        norm=max((abs(x - y) / x for x, y in pairs), default=0.0),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN, -0.0 is not 0.0."""
    return a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def distances(a: Tensors, b: Tensors) -> dict[str, float]:
    """Relative L2 distance of masters and moments over all parameters, and the largest of masters ("max_master")."""
    found = {}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        names = [name for name in a if name.endswith("." + kind)]
        x, y = (torch.cat([t[name].double().flatten() for name in names]) for t in (a, b))
        found[kind] = float((x - y).norm() / y.norm())
        if kind == "master":
            found["max_master"] = float((x - y).abs().max())
    return found
