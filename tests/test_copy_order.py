"""The order in which copies, and what they wait for, are issued: what a GPU would find too late, seen without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.offload.groups import Group
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.overlap import OverlappedSteps
from heavylift.offload.pieces import PieceSteps
from heavylift.offload.streams import Streams
from heavylift.offload.worker import Worker


def make(dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[list[nn.Parameter], TieredAdamW]:
    """Three parameters in one group, whose gradients lie apart."""
    params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (1000, 500, 700)]
    return params, TieredAdamW(params, lr=1e-2, options=TieredOptions(tier=Tier.HOST, **options))


@contextmanager
def logged(*methods: tuple[type, str]) -> Iterator[list[str]]:
    """The names of these methods, as they are called; they do what they do."""
    log: list[str] = []

    def logging(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(patch.object(owner, name, logging(name, getattr(owner, name))))
        yield log


@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.SPLIT])
def test_a_synchronous_step_fetches_behind_gradients_that_it_has_put_together(state_format: StateFormat) -> None:
    params, optimizer = make(schedule=Schedule.SYNCHRONOUS, state_format=state_format)
    for param in params[:2]:
        param.grad = torch.ones_like(param)
    with logged((Group, "grads"), (Streams, "step_after_current"), (PieceSteps, "step")) as log:
        optimizer.step()
    assert "".join(name[0] for name in log[log.index("step_after_current") - 1 :]) == "gss", log
    assert log[-2:] == ["step_after_current", "step"]
    optimizer.close()


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_deferred_step_fetches_behind_what_has_been_written_after_backward(accumulate: bool) -> None:
    params, optimizer = make(schedule=Schedule.DEFERRED, state_format=StateFormat.SPLIT, accumulate=accumulate)
    sum(param.sum() for param in params).backward()
    with logged((Streams, "step_after_current"), (Worker, "submit")) as log:
        optimizer.step()
    steps = log[log.index("step_after_current") :]
    assert steps == ["step_after_current", "submit"], log
    optimizer.close()


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_gradient_is_held_while_it_is_copied(ratio: float) -> None:
    """Also where a part of its group stays on the device, whose step lets go of it."""
    params, optimizer = make(schedule=Schedule.DEFERRED, ratio=ratio)
    (params[0].sum() + params[1].sum()).backward()  # the last one has none: they are put together
    with logged((OverlappedSteps, "_hold_until_copied")) as log:
        optimizer.step()
    assert log == ["_hold_until_copied"]
    optimizer.close()


def test_who_reads_after_a_failed_synchronous_step_is_told() -> None:
    params, optimizer = make(schedule=Schedule.SYNCHRONOUS)
    for param in params:
        param.grad = torch.ones_like(param)
    with patch.object(PieceSteps, "step", side_effect=RuntimeError("driver error 201")):
        with pytest.raises(RuntimeError, match="201"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="the optimizer step of this group failed"):
        optimizer.state_dict()
    optimizer.close()
