"""Small tensors between host and device, and numbers of all ranks. On a GPU nothing waits, and nothing is too early."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks.pool import run_on_ranks

from heavylift.transfer import HostScalar, RankNumbers, to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("make", [torch.clone, torch.Tensor.t, lambda rows: rows[1:, ::2], lambda rows: rows[:0]])
def test_to_device_on_the_cpu(dtype: torch.dtype, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = make(torch.arange(24).view(4, 6).to(dtype))
    there = to_device(source, CPU)
    assert there.device == CPU and there.dtype == dtype and torch.equal(there, source)
    # no copy, as `Tensor.to`: who writes into what comes back writes into what was given
    assert there.data_ptr() == source.data_ptr() and there.stride() == source.stride()
    twice = to_device(there, CPU)
    assert torch.equal(twice, source)


def test_a_host_scalar_holds_what_was_sent_last() -> None:
    number = HostScalar(CPU)
    source = torch.tensor(1.5)
    number.send(source)
    source.fill_(99.0)  # it was copied, not looked at
    assert number.take() == 1.5 and number.take() == 1.5
    number.send(torch.tensor(-0.25))
    number.send(torch.tensor(torch.finfo(torch.float32).max))
    assert number.take() == torch.finfo(torch.float32).max
    number.send(torch.tensor(float("nan")))
    assert number.take() != number.take()
    number.send(torch.tensor(1 / 3, dtype=torch.float64))
    assert number.take() == torch.tensor(1 / 3, dtype=torch.float32).item()
    assert isinstance(number.take(), float)


def test_two_host_scalars_do_not_share_their_place() -> None:
    one, other = HostScalar(CPU), HostScalar(CPU)
    one.send(torch.tensor(1.0))
    other.send(torch.tensor(2.0))
    assert (one.take(), other.take()) == (1.0, 2.0)


EXACT = 2**53 - 1
"""A whole number that float32 would round: bytes of memory are as large."""


def gather_job() -> tuple[list[list[list[float]]], list[str]]:
    """What each call gathers, and what it warns of."""
    numbers, rank = RankNumbers(CPU), dist.get_rank()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [
            numbers.gather((rank + 0.5, -rank, EXACT - rank)),
            numbers.gather([float(rank)]),
            numbers.gather([float("inf"), 0.1 * rank]),
        ]
    return found, [str(one.message) for one in told]


@pytest.mark.parametrize("world_size", [1, 2])
def test_numbers_of_all_ranks(world_size: int) -> None:
    expected = [
        [[rank + 0.5, -rank, EXACT - rank] for rank in range(world_size)],
        [[float(rank)] for rank in range(world_size)],
        [[float("inf"), 0.1 * rank] for rank in range(world_size)],
    ]
    for found, told in run_on_ranks(world_size, gather_job):
        assert found == expected
        assert all(type(number) is float for call in found for numbers in call for number in numbers)
        assert told == []


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_the_program_does_not_wait_and_nothing_is_too_early() -> None:
    device = torch.device("cuda")
    busy = torch.cuda.Event()
    source, number = torch.arange(1000), HostScalar(device)
    late = torch.zeros((), device=device)
    # once: page-locking a new block, and the first call of a kernel, may wait for the device
    number.send(to_device(source, device).float().sum().add_(7.0))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    there = to_device(source, device)
    late.add_(7.0)
    number.send(late)
    assert not busy.query(), "to_device or send waited for the device"
    assert number.take() == 7.0 and busy.query()
    assert torch.equal(there.cpu(), source)
