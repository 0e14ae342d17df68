"""initialize() says what does not fit before it allocates, and what would."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from ranks.pool import run_on_ranks
from torch import nn

from heavylift.errors import UserError
from heavylift.memory.machine import MachineMemory

GIB = 2**30


def refused_job(offload: dict[str, Any], machine: MachineMemory, num_layers: int = 4) -> str:
    """The message of initialize() on a machine with so much memory free, "" where it is content."""
    import heavylift

    zero = {"stage": 3, "offload_optimizer": offload} if offload else {"stage": 3}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(num_layers)))
    measured = patch("heavylift.api.memory_check.measure", lambda device: machine)
    # the models here are small beside what is usually left free
    with measured, patch("heavylift.memory.fit.DEVICE_RESERVE_BYTES", 0):
        try:
            engine, *_ = heavylift.initialize(model=model, config=config)
        except UserError as error:
            return "\n".join(error.problems)
    engine.destroy()
    return ""


def machine(host_gib: float, device_gib: float | None = None) -> MachineMemory:
    return MachineMemory(int(host_gib * GIB), None if device_gib is None else int(device_gib * GIB))


def test_states_that_the_host_does_not_take_are_refused_on_every_rank() -> None:
    # 12 bytes of states and 2 of kept gradient for 4 M parameters: 0.05 GiB and the staging
    said = run_on_ranks(2, refused_job, {"device": "cpu"}, machine(0.04))
    assert said[0] == said[1]
    (line,) = said[0].splitlines()
    assert line.startswith("host memory: parameters and optimizer states need 0.1 GiB on this machine (2 x 0.0)")
    assert run_on_ranks(2, refused_job, {"device": "cpu"}, machine(0.2)) == ["", ""]


def test_a_ratio_that_would_fit_is_named() -> None:
    # as if there were an accelerator with room; 60 M parameters with 14 bytes on the host each are 0.8 GiB
    free = machine(0.7, device_gib=20)
    (line,) = run_on_ranks(1, refused_job, {"device": "cpu"}, free, 60)
    found = line.rsplit("what would fit: zero_optimization.offload_optimizer.ratio ", 1)
    assert len(found) == 2, line
    assert 0 < float(found[1]) < 0.5, "half a GiB is kept free"
    assert run_on_ranks(1, refused_job, {"device": "cpu", "ratio": float(found[1])}, free, 60) == [""]


@pytest.mark.parametrize(("host_gib", "helps"), [(40.0, True), (0.01, False)])
def test_offloading_is_named_where_it_would_help(host_gib: float, helps: bool) -> None:
    (line,) = run_on_ranks(1, refused_job, {}, machine(host_gib, device_gib=0.08))
    assert line.startswith("device memory: ") and "before any activation" in line
    assert line.endswith('what would fit: zero_optimization.offload_optimizer.device "cpu"') == helps
