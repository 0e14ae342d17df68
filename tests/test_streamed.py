"""Steps that the GPU takes of states on the host, and gradients that wait there: the same bits as the CPU's with
gradients on the host, in every schedule, format and cut.

On a CPU the "GPU" is the same memory and every copy is immediate; streams are tested by `tests/test_gpu_schedules.py`
and `tests/test_gpu_kernel.py`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.schedules import Disturbance, compare, run
from ranks.sharded import Setup, build, take_step

from heavylift.offload.states import Part
from heavylift.offload.tiers import choose_streamed

STEPS = make_steps(6, VOCAB)
SLOW_S = 0.002
CHUNK = 777
"""Groups of the tiny model are cut into several chunks, inside parameters."""
CALM, STRIKES = 1e6, 0.05
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("streamed") / "model", True)


@pytest.mark.parametrize(
    ("numels", "share", "expected"),
    [
        ([4, 4, 4, 4], 0.0, [False] * 4),
        ([4, 4, 4, 4], 1.0, [True] * 4),
        ([4, 4, 4, 4], 0.5, [True, False, True, False]),
        ([0, 4, 0, 4], 1.0, [False, True, False, True]),
        ([1, 1, 1, 1, 1, 1], 1 / 3, [False, True, False, False, True, False]),
        ([100, 1, 1], 0.1, [False, True, True]),
        ([], 1.0, []),
    ],
)
def test_streamed_parts_are_spread_evenly(numels: list[int], share: float, expected: list[bool]) -> None:
    assert choose_streamed(numels, share) == expected


def test_their_share_is_met_to_half_a_group() -> None:
    numels = [300, *([70] * 30), 500]
    for share in (0.1, 0.37, 0.5, 0.9):
        streamed = sum(n for n, on_bus in zip(numels, choose_streamed(numels, share), strict=True) if on_bus)
        assert abs(streamed - share * sum(numels)) <= max(numels) / 2 + 1


def setting_job(folder: Path, setup: Setup, bad: str) -> list[tuple[str, tuple[str, ...], bool, bool]]:
    """Runs with streamed states beside those that the CPU steps: (name, tensors that differ, losses differ, as many
    steps and revisions)."""
    disturbance = Disturbance(bad=bad, at=2 if bad else -1)
    found = []
    schedules = ["synchronous", "deferred", "auto"]
    if setup.state_format != "bf16":
        schedules.append("speculative")
    if setup.accumulation > 1:
        schedules = schedules[:2]
    for schedule in schedules:
        for share, ratio, gradients_on in ((1.0, 1.0, "host"), (0.5, 0.8, "device"), (0.0, 1.0, "device")):
            # what was taken early and revised is not the synchronous step's bits, but it is those of the CPU's revision
            by_cpu = replace(setup, schedule=schedule, ratio=ratio)
            twin = run(folder, by_cpu, STEPS, disturbance)
            with patch("heavylift.offload.streamed.CHUNK_NUMEL", CHUNK):
                slow = replace(disturbance, host_step_s=SLOW_S)
                changed = replace(by_cpu, streamed_share=share, gradients_on=gradients_on)
                other = run(folder, changed, STEPS, slow)
            difference = compare(other, twin)
            same_work = twin.operations == other.operations
            name = f"{schedule} streamed {share} ratio {ratio} gradients on {gradients_on}"
            found.append((name, difference.tensors, difference.losses, same_work))
    return found


@pytest.mark.parametrize(
    ("world", "setup", "bad"),
    [
        (1, Setup(dtype=BF16, clip=STRIKES, two_groups=True), ""),
        (2, Setup(dtype=BF16, clip=CALM, freeze=("model.layers.0.*",)), "late"),
        (2, Setup(dtype=F32, clip=STRIKES, stage=1), "all"),
        (2, Setup(dtype=F32, clip=STRIKES, accumulation=2), "all"),
        (1, Setup(dtype=BF16, clip=0.0, accumulation=2, state_format="split"), ""),
        (2, Setup(dtype=BF16, clip=STRIKES, state_format="split"), "late"),
        (2, Setup(dtype=BF16, clip=STRIKES, state_format="bf16"), ""),
    ],
    ids=str,
)
def test_bits_are_those_of_the_cpu(world: int, setup: Setup, bad: str, folder: Path) -> None:
    for rank in run_on_ranks(world, setting_job, folder, setup, bad):
        assert [row for row in rank if row[1] or row[2] or not row[3]] == []


def checkpoint_job(folder: Path, setup: Setup) -> tuple[bool, int, int]:
    """Whether a state_dict taken in the middle goes on with the same bits; threads; streamed parts."""
    from ranks.schedules import local_tensors, same_bits

    with patch("heavylift.offload.streamed.CHUNK_NUMEL", CHUNK):
        whole, resumed = build(folder, setup), build(folder, replace(setup, streamed_share=0.0))
    for rows in STEPS[:3]:
        take_step(whole, rows)
    state = whole.optimizer.state_dict()
    resumed.optimizer.load_state_dict(state)
    for rows in STEPS[3:]:
        take_step(whole, rows)
        take_step(resumed, rows)
    mine, other = local_tensors(whole), local_tensors(resumed)
    threads = len(whole.optimizer.worker_threads)
    num_streamed = sum(part.streamed for parts in whole.optimizer.parts for part in parts)
    for engine in (whole, resumed):
        engine.optimizer.close()
    return all(same_bits(mine[name], other[name]) for name in mine), threads, num_streamed


def test_a_checkpoint_goes_on_where_the_cpu_steps(folder: Path) -> None:
    setup = Setup(dtype=BF16, clip=STRIKES, schedule="deferred", streamed_share=1.0)
    for same, threads, num_streamed in run_on_ranks(2, checkpoint_job, folder, setup):
        assert same and threads == 2 and num_streamed == 3


def order_job(folder: Path) -> tuple[list[str], list[str]]:
    """Streamed parts in the order in which they were stepped, the bus thread held until step() is over; and groups in
    forward order."""
    engine = build(folder, Setup(dtype=BF16, clip=CALM, schedule="speculative", streamed_share=1.0))
    optimizer = engine.optimizer
    streamed, stepped, go_on = optimizer._streamed, list[str](), threading.Event()
    assert streamed is not None
    run_part = streamed.run

    def held(part: Part, *args: Any) -> None:
        assert go_on.wait(60), "step() has not come back"
        stepped.append(part.group.name)
        run_part(part, *args)

    streamed.run = held  # type: ignore[method-assign]
    result = take_step(engine, STEPS[0])
    assert result.grad_norm < CALM and stepped == []
    go_on.set()
    optimizer.synchronize()
    optimizer.close()
    return stepped, [group.name for group in optimizer.groups]


def test_what_is_left_after_backward_is_streamed_in_forward_order(folder: Path) -> None:
    ((stepped, forward),) = run_on_ranks(1, order_job, folder)
    assert sorted(stepped) == sorted(forward) and len(forward) == 3
    # the first was at work, or not yet begun, when the others came; those came in backward order
    assert stepped[1:] == [name for name in forward if name in stepped[1:]]
