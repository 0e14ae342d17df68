"""The device's parts step in one call for each set of hyperparameters, and bad tensors do not get that far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.offload import optimizer as optimizer_module
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.tensors import StepTensors

SHAPES = [(16, 4), (7,), (3, 5), (1,), (33,)]


class CountingKernel(PlainKernel):
    """Keeps how many tensors each call had, and with which hyperparameters."""

    def __init__(self) -> None:
        self.calls: list[tuple[AdamWHyper, int]] = []

    def prepare_all(self, tensors: Sequence[StepTensors]) -> Callable[[AdamWHyper], None]:
        step = super().prepare_all(tensors)

        def counted(hyper: AdamWHyper) -> None:
            self.calls.append((hyper, len(tensors)))
            step(hyper)

        return counted


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    made = CountingKernel()
    monkeypatch.setattr(optimizer_module, "device_kernel", lambda device: made)
    return made


def _params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _backward(params: Sequence[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()


def _num_on_device(optimizer: TieredAdamW) -> int:
    """Parameters of which something is stepped there."""
    device_parts = [part for parts in optimizer.parts for part in parts if part.tier is Tier.DEVICE]
    return sum(part.overlap(segment) is not None for part in device_parts for segment in part.group.segments)


OPTIONS = {
    "device": TieredOptions(max_grad_norm=0.5),
    "device, accumulated": TieredOptions(max_grad_norm=0.5, accumulate=True),
    "synchronous": TieredOptions(Tier.HOST, 0.4, max_grad_norm=0.5),
    "deferred": TieredOptions(Tier.HOST, 0.4, Schedule.DEFERRED, max_grad_norm=0.5),
    "deferred, accumulated": TieredOptions(Tier.HOST, 0.4, Schedule.DEFERRED, accumulate=True, max_grad_norm=0.5),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_one_call_for_each_set_of_hyperparameters(options: TieredOptions, kernel: CountingKernel) -> None:
    params = _params()
    # laid out in this order: with ratio 0.4 all of the first and some of the second are on the device
    groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 1e-3}]
    optimizer = TieredAdamW(groups, options=options)
    twins = _params()
    twin = torch.optim.AdamW(
        [{"params": twins[::2], "lr": 1e-2}, {"params": twins[1::2], "lr": 1e-3}], weight_decay=0, foreach=False
    )
    for step in range(1, 4):
        kernel.calls.clear()
        _backward(params, step)
        _backward(twins, step)
        torch.nn.utils.clip_grad_norm_(twins, 0.5)
        optimizer.step()
        twin.step()
        optimizer.zero_grad()
        twin.zero_grad()
        optimizer.synchronize()
        hypers = [hyper for hyper, _ in kernel.calls]
        assert len(set(hypers)) == len(hypers), "a set of hyperparameters was stepped in more than one call"
        assert all(hyper.step == step and hyper.grad_scale < 1 for hyper in hypers)
        assert sum(count for _, count in kernel.calls) == _num_on_device(optimizer) > 1
        for mine, torchs in zip(params, twins, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-6)
    optimizer.close()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_skipped_step_leaves_no_trace(options: TieredOptions, kernel: CountingKernel) -> None:
    outcomes = []
    for overflows in (False, True):
        params = _params()
        optimizer = TieredAdamW(params, lr=1e-2, options=options)
        for step in range(4):
            if overflows and step == 2:
                kernel.calls.clear()
                (params[0] * math.inf).sum().backward()
                optimizer.step()
                assert optimizer.skipped and not kernel.calls
                optimizer.zero_grad()
            _backward(params, step)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        outcomes.append([p.detach() for p in params] + [t for entry in state.values() for t in entry.values()])
        optimizer.close()
    for without, after in zip(*outcomes, strict=True):
        assert torch.equal(without, after)


def _tensors(state_format: StateFormat) -> StepTensors:
    split = state_format is StateFormat.SPLIT
    master = torch.zeros(8, dtype=torch.int16 if split else torch.float32)
    return StepTensors(master, *torch.zeros(2, 8), torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), state_format)


@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.SPLIT])
@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "grad", "param_out"])
def test_tensors_that_do_not_fit_are_refused(name: str, state_format: StateFormat) -> None:
    tensors = _tensors(state_format)
    tensors.check()
    good = tensors.named()[name]
    wrong: dict[str, Callable[[], torch.Tensor]] = {
        "dtype": lambda: good.to(torch.float64),
        "shape": lambda: torch.zeros(9, dtype=good.dtype),
        "shape ": lambda: good.view(2, 4),
        "on ": lambda: good.to("meta"),
    }
    for word, make in wrong.items():
        with pytest.raises(AssertionError, match=word.strip()):
            replace(tensors, **{name: make()}).check()
    with pytest.raises(AssertionError, match="scales True"):
        replace(tensors, scales=(torch.zeros(1), torch.zeros(1))).check()
