"""What comes down to slots for tasks that are put into another order: nobody is left without one, or with old values.

The worker is held up at chosen tasks, so that the order is the same every time.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.offload.groups import make_group
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions

NUM_GROUPS = 8


def steps(
    state_format: StateFormat, gradients_on: Tier, limit: float, bad: bool, held: bool, schedule: Schedule
) -> tuple[list[torch.Tensor], list[float]]:
    """Weights and norms after three steps. `held`: the worker stands in its first task until backward has ended, and in
    its second, while the third has its slots already, until `step()` has put what is left into forward order."""
    params = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(NUM_GROUPS)]
    groups = [make_group(f"group {i}", [("weight", param)]) for i, param in enumerate(params)]
    options = TieredOptions(
        tier=Tier.HOST,
        schedule=schedule,
        max_grad_norm=limit,
        state_format=state_format,
        gradients_on=gradients_on,
    )
    optimizer = TieredAdamW(params, lr=1e-3, groups=[g for g in groups if g is not None], options=options)
    after_backward, reordered = threading.Event(), threading.Event()
    gates = [after_backward, reordered]
    assert optimizer._overlap is not None or not held
    worker = None if optimizer._overlap is None else optimizer._overlap.worker
    stepped: Any = optimizer._stepper.host.step
    reorder: Any = None if worker is None else worker.turn_to_forward_order

    def reorder_and_tell() -> None:
        reorder()
        reordered.set()

    def held_up(*arguments: Any) -> None:
        if held and gates:
            assert gates.pop(0).wait(60)
        stepped(*arguments)

    optimizer._stepper.host.step = held_up  # type: ignore[method-assign]
    if worker is not None:
        worker.turn_to_forward_order = reorder_and_tell  # type: ignore[method-assign]
    norms = []
    for step in range(3):
        product = torch.ones(64, dtype=torch.bfloat16)
        for param in params:
            product = product * param
        if bad and step == 1:
            # the last gradient of a backward: all others have been stepped, or wait for it
            params[0].register_hook(lambda grad: grad * float("inf"))
        product.sum().backward()
        after_backward.set()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    optimizer.synchronize()
    weights = [param.detach().clone() for param in params]
    optimizer.close()
    return weights, norms


@pytest.mark.parametrize("gradients_on", list(Tier)[:2])
@pytest.mark.parametrize("state_format", [StateFormat.SPLIT, StateFormat.FP32])
@pytest.mark.parametrize(("limit", "bad"), [(5.0, False), (0.0, True), (1e6, False)])
def test_a_task_put_back_in_the_order_leaves_a_slot_for_those_before_it(
    limit: float, bad: bool, state_format: StateFormat, gradients_on: Tier
) -> None:
    """Corrections, undoings, and steps alone."""
    weights, norms = steps(state_format, gradients_on, limit, bad, True, Schedule.SPECULATIVE)
    twin, twin_norms = steps(state_format, gradients_on, limit, bad, False, Schedule.SPECULATIVE)
    assert norms == twin_norms or bad
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, twin, strict=True))
    if limit == 1e6:
        exact, _ = steps(StateFormat.FP32, Tier.HOST, limit, bad, False, Schedule.SYNCHRONOUS)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, exact, strict=True))
