"""initialize() says what does not fit before it allocates, and what would."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from ranks.pool import run_on_ranks
from torch import nn

from heavylift.errors import UserError
from heavylift.memory.machine import MachineMemory

GIB = 2**30


class _Layered(nn.Module):
    """A model that says that its layers may be gathered one by one."""

    _no_split_modules = ("Linear",)

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def refused_job(
    offload: dict[str, Any],
    machine: MachineMemory,
    num_layers: int = 4,
    own: dict[str, Any] | None = None,
    by_layer: bool = False,
) -> str:
    """The message of initialize() on a machine with so much memory free, "" where it is content. `own`: the block
    `heavylift`; `by_layer`: every layer is gathered by itself, and no memory of the host is kept free."""
    import heavylift

    zero = {"stage": 3, "offload_optimizer": offload} if offload else {"stage": 3}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "heavylift": own,
    }
    layers = [nn.Linear(1000, 1000, bias=False) for _ in range(num_layers)]
    model = _Layered(layers) if by_layer else nn.Sequential(*layers)
    measured = patch("heavylift.api.memory_check.measure", lambda device: machine)
    # the models here are small beside what is usually left free
    nothing = patch("heavylift.memory.plan.HOST_FLOOR_SHARE", 0.0) if by_layer else nullcontext()
    with measured, nothing, patch("heavylift.memory.fit.DEVICE_RESERVE_BYTES", 0):
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
    # as if there were an accelerator with room; 150 M parameters with 14 bytes on the host each are 2 GiB
    free = machine(1.8, device_gib=20)
    (line,) = run_on_ranks(1, refused_job, {"device": "cpu"}, free, 150)
    found = line.rsplit("what would fit: zero_optimization.offload_optimizer.ratio ", 1)
    assert len(found) == 2, line
    assert 0.74 < float(found[1]) < 0.79, "12% are kept free"
    assert run_on_ranks(1, refused_job, {"device": "cpu", "ratio": float(found[1])}, free, 150) == [""]


@pytest.mark.parametrize(("host_gib", "helps"), [(40.0, True), (0.01, False)])
def test_offloading_is_named_where_it_would_help(host_gib: float, helps: bool) -> None:
    (line,) = run_on_ranks(1, refused_job, {}, machine(host_gib, device_gib=0.08))
    assert line.startswith("device memory: ") and "before any activation" in line
    assert line.endswith('what would fit: zero_optimization.offload_optimizer.device "cpu"') == helps


CPU, SPLIT = 'zero_optimization.offload_optimizer.device "cpu"', 'heavylift.state_format "split"'
RATIO, THERE = "zero_optimization.offload_optimizer.ratio", 'heavylift.gradients_on "device"'


def applied(remedy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks offload_optimizer and heavylift with the keys that a message names."""
    offload: dict[str, Any] = {"device": "cpu"}
    own: dict[str, Any] = {}
    for word in remedy.split(" and "):
        key, _, value = word.partition(" ")
        block = own if key.startswith("heavylift.") else offload
        block[key.rpartition(".")[2]] = json.loads(value)
    return offload, own


@pytest.mark.parametrize(
    ("offload", "host_mib", "device_mib", "found"),
    [
        # 20 layers of 1 M parameters: 229 MiB of states, 191 with split, and 38 of gradients kept on the host;
        # a step takes some 25 MiB of the device where all gradients go to the host, 50 where all stay
        ({"device": "cpu"}, 270, 95, [f"{RATIO} 0.97", SPLIT, THERE]),
        ({"device": "cpu"}, 245, 40, [SPLIT]),
        ({"device": "cpu"}, 220, 75, [f"{SPLIT} and {THERE}"]),
        ({"device": "cpu"}, 200, 72, [f"{SPLIT} and {RATIO} 0.83"]),
        ({"device": "cpu"}, 150, 72, []),
        ({}, 100, 250, [SPLIT]),
        ({}, 245, 60, [f"{CPU} and {SPLIT}"]),
    ],
)
def test_what_keeps_every_bit_is_named(
    offload: dict[str, Any], host_mib: int, device_mib: int, found: list[str]
) -> None:
    free = MachineMemory(host_mib * 2**20, device_mib * 2**20)
    said = run_on_ranks(1, refused_job, offload, free, 20, None, True)[0]
    for line in said.splitlines():
        _, is_told, remedies = line.partition("what would fit: ")
        assert (remedies.split(", or ") if is_told else []) == found, said
    for remedy in found:
        blocks = applied(remedy) if offload or CPU in remedy else ({}, applied(remedy)[1])
        assert run_on_ranks(1, refused_job, blocks[0], free, 20, blocks[1], True) == [""], remedy
