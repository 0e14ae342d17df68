"""Additions beside backward on a CUDA device: copies on a side stream, sources that are given out again at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from heavylift.offload.additions import HostAdditions
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.stepping import PartStepper
from heavylift.offload.streams import Streams
from heavylift.offload.tiers import HostSlab, TierUsage
from heavylift.offload.timeline import Timeline
from heavylift.offload.worker import Worker

pytestmark = pytest.mark.gpu
NUMEL = 3_000_001


class SlowKernel(PlainKernel):
    """Every addition takes a while: the training thread runs ahead until the ring is full."""

    def accumulate(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """total += grad."""
        time.sleep(0.002)
        super().accumulate(total, grad)


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def additions(device: torch.device) -> Iterator[HostAdditions]:
    timeline = Timeline()
    worker = Worker(device, timeline)
    slab = HostSlab(4 * NUMEL, pinned=True, usage=TierUsage())
    stepper = PartStepper(SlowKernel(), PlainKernel(), None, Streams(device), timeline)
    yield HostAdditions(worker, stepper, slab.take(NUMEL, torch.float32))
    worker.close()
    slab.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_right_while_their_memory_is_used_again(
    additions: HostAdditions, device: torch.device, dtype: torch.dtype
) -> None:
    """The reduce stream writes a gradient late, lets go of it at once, and fills what it gets next with NaN."""
    reduce_stream = torch.cuda.Stream(device)
    sizes = (NUMEL, NUMEL // 3, 7, NUMEL // 8 + 5)
    totals, expected = [torch.zeros(n) for n in sizes], [torch.zeros(n) for n in sizes]
    for step in range(6):
        for index, size in enumerate(sizes):
            with torch.cuda.stream(reduce_stream):
                torch.cuda._sleep(2_000_000)  # about a millisecond: the copy must wait for what comes next
                grad = torch.full((size,), 0.1 * (step + 1), device=device, dtype=dtype)
                grad.mul_(index + 1)
                expected[index] += torch.full((size,), 0.1 * (step + 1), dtype=dtype).mul_(index + 1)
                additions.add(index, "group", totals[index], grad)
                additions.hand_over(index, "group")
                del grad
                torch.full((size,), float("nan"), device=device, dtype=dtype)
    additions.settle()
    for total, plain in zip(totals, expected, strict=True):
        assert torch.equal(total, plain)


def test_memory_of_gradients_is_let_go_of(additions: HostAdditions, device: torch.device) -> None:
    total = torch.zeros(NUMEL)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        additions.add(0, "group", total, torch.ones(NUMEL, device=device))
        additions.hand_over(0, "group")
    additions.settle()
    assert torch.cuda.memory_allocated() == before and float(total[-1]) == 20
