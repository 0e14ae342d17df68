"""States read and written from outside a piece at a time: the same values, and little memory for a large parameter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from heavylift.config.schema import StateFormat, Tier
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.states import STATE_NAMES

ROOT = Path(__file__).parent.parent


def trained(state_format: StateFormat, dtype: torch.dtype) -> TieredAdamW:
    """An optimizer over odd sizes after two steps, cut between the tiers inside a parameter."""
    generator = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (3001, 1, 1024)]
    options = TieredOptions(tier=Tier.HOST, ratio=0.7, state_format=state_format, num_threads=1)
    optimizer = TieredAdamW(params, lr=1e-2, options=options)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.numel(), generator=generator).to(dtype)
        optimizer.step()
    return optimizer


def values(optimizer: TieredAdamW) -> dict[str, torch.Tensor]:
    """Every state of every part, as it is read."""
    return {
        f"{name} {segment.start} {part.start}": part.read(name, segment).clone()
        for group, parts in zip(optimizer.groups, optimizer.parts, strict=True)
        for segment in group.segments
        for part in parts
        if part.overlap(segment) is not None
        for name in STATE_NAMES
    }


@pytest.mark.parametrize("state_format", list(StateFormat))
def test_pieces_hold_the_values_of_the_whole(state_format: StateFormat) -> None:
    whole, in_pieces = (trained(state_format, torch.bfloat16) for _ in range(2))
    expected = values(whole)
    assert len(expected) >= 3 * 4
    with patch("heavylift.offload.states.PIECE_NUMEL", 256):
        found = values(in_pieces)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    # and back again, from another optimizer's dictionary
    state = whole.state_dict()
    other = trained(state_format, torch.bfloat16)
    other.step()  # without gradients: nothing; the loaded states must replace what two steps left
    with patch("heavylift.offload.states.PIECE_NUMEL", 256):
        other.load_state_dict(state)
    twin = trained(state_format, torch.bfloat16)
    twin.load_state_dict(state)
    loaded, reference = values(other), values(twin)
    assert all(torch.equal(loaded[key], value) for key, value in reference.items())
    for optimizer in (whole, in_pieces, other, twin):
        optimizer.close()


PEAK = """
import re, torch
from torch import nn
from heavylift.config.schema import StateFormat, Tier
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
torch.set_num_threads(1)

def status(name):
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", open("/proc/self/status").read(), re.M).group(1)) * 1024

param = nn.Parameter(torch.ones(2**26, dtype=torch.bfloat16))
optimizer = TieredAdamW([param], options=TieredOptions(tier=Tier.HOST, state_format=StateFormat.SPLIT, num_threads=1))
with torch.no_grad():
    param.mul_(2)  # somebody else's write: masters are read again
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
optimizer.follow_parameters()
print(status("VmHWM") - before)
optimizer.close()
"""


def test_masters_of_a_large_parameter_are_read_in_little_memory() -> None:
    """At once, 64 million split masters took more than a gigabyte of temporaries; on a full host that is the end."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300e6


def test_bfloat16_parameters_are_read_as_the_float32_numbers_that_they_are() -> None:
    """What a start does with every parameter goes a shorter way; also over states that have marks of their own."""
    short, long = (trained(StateFormat.SPLIT, torch.bfloat16) for _ in range(2))
    numbers = torch.tensor([1.0, -2.5, -0.0, 3e38, float("inf"), 1e-40]).bfloat16()
    for optimizer, dtype in ((short, torch.bfloat16), (long, torch.float32)):
        for group, parts in zip(optimizer.groups, optimizer.parts, strict=True):
            for segment in group.segments:
                new = numbers[torch.arange(segment.numel) % 6]
                segment.param.data.copy_(new)
                for part in parts:
                    part.write("master", segment, new.to(dtype))
    marked = [torch.signbit(p.exp_avg_sq).any() for o in (short, long) for parts in o.parts for p in parts]
    assert not any(marked)
    for ours, theirs in zip(short.parts, long.parts, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.master, other.master) and torch.equal(one.exp_avg_sq, other.exp_avg_sq)
    found, expected = values(short), values(long)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    master = torch.cat([v for key, v in found.items() if key.startswith("master")])
    assert sorted(master.unique().tolist()) == sorted(set(numbers.float().tolist()))
    for optimizer in (short, long):
        optimizer.close()
