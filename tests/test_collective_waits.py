"""What the computation waits for collectives: which waits are seen, and that looking changes nothing."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import CPU, Setup, build, take_step, whole_weights
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

import heavylift.collective_waits
from heavylift.collective_waits import CollectiveWaits, _Wait

STEPS = make_steps(3, VOCAB)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("waits") / "odd", tied=False)


@dataclass
class PlayedEvent:
    """An event of a device that has passed everything up to `now`; times are seconds in this clock."""

    clock: itertools.count = field(repr=False)
    seconds: float = 0.0
    passed: bool = True

    def record(self) -> None:
        self.seconds = next(self.clock)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: PlayedEvent) -> float:
        return 1e3 * (other.seconds - self.seconds)


def at(seconds: float) -> PlayedEvent:
    return PlayedEvent(itertools.count(), seconds)


@pytest.mark.parametrize(
    ("needed", "began", "done", "waited"),
    [
        (5, 3, 8, 3),  # computing until 5, the collective had begun before
        (5, 7, 8, 1),  # behind a gate until 7: not the collective's fault
        (5, 3, 4, 0),  # hidden
        (5, None, 8, 3),
        (5, None, 4, 0),
    ],
)
def test_waiting_is_from_when_it_is_needed_and_runs_to_its_end(
    needed: float, began: float | None, done: float, waited: float
) -> None:
    wait = _Wait(at(needed), None if began is None else at(began), at(done))
    assert wait.seconds(at(2)) == pytest.approx(waited)


# ---- on ranks -----------------------------------------------------------------------------------------------------


def count_calls(calls: dict[str, int]) -> None:
    """Counts FSDP2's own collectives in `calls`."""
    for kind in (DefaultAllGather, DefaultReduceScatter):
        original = kind.__call__

        def counted(self, *args, original=original, name=kind.__name__, **kwargs):  # type: ignore[no-untyped-def]
            calls[name] = calls.get(name, 0) + 1
            return original(self, *args, **kwargs)

        kind.__call__ = counted  # type: ignore[method-assign]


def blocked_job(folder: Path, setup: Setup) -> tuple[list[float], list[dict[str, int]]]:
    """Seconds of a clock that moves by one whenever it is looked at, beside the collectives that there were."""
    engine = build(folder, setup)
    calls: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultAllGather, "__call__", DefaultAllGather.__call__)  # put back at the end
        patch.setattr(DefaultReduceScatter, "__call__", DefaultReduceScatter.__call__)
        count_calls(calls)
        waits = CollectiveWaits(engine.sharded, CPU)
        clock = itertools.count()
        patch.setattr(heavylift.collective_waits.time, "perf_counter", lambda: float(next(clock)))
        seconds, seen = [], []
        for rows in STEPS:
            take_step(engine, rows, setup.accumulation)
            seconds.append(waits.take_s())
            seen.append(dict(calls))
            calls.clear()
    engine.optimizer.close()
    return seconds, seen


@pytest.mark.parametrize("tier", ["host", "device"])
def test_without_a_gpu_every_collective_counts(odd_llama: Path, tier: str) -> None:
    setup = Setup(stage=3, tier=tier, accumulation=2)
    for seconds, seen in run_on_ranks(2, blocked_job, odd_llama, setup):
        for waited, calls in zip(seconds, seen, strict=True):
            assert calls["DefaultAllGather"] > calls["DefaultReduceScatter"] > 4
            assert waited == sum(calls.values())


def on_a_played_device_job(
    folder: Path, setup: Setup, watched: bool
) -> tuple[list[tuple[int, int, int, int]], list[float], dict[str, torch.Tensor]]:
    """As on a GPU, with events of a clock that moves by one whenever one is recorded.

    Per step: all-gathers, the waits for them, reduce-scatters, the waits for reductions.
    """
    engine = build(folder, setup)
    counts, seconds = [], []
    with pytest.MonkeyPatch.context() as patch:
        clock = itertools.count()

        def now() -> PlayedEvent:
            event = PlayedEvent(clock)
            event.record()
            return event

        patch.setattr(heavylift.collective_waits, "_now", now)
        patch.setattr("torch.cuda.Event", lambda enable_timing: PlayedEvent(clock))
        patch.setattr(DefaultAllGather, "__call__", DefaultAllGather.__call__)  # put back at the end
        patch.setattr(DefaultReduceScatter, "__call__", DefaultReduceScatter.__call__)
        calls: dict[str, int] = {}
        count_calls(calls)
        waits = CollectiveWaits(engine.sharded, torch.device("cuda")) if watched else None
        for rows in STEPS if waits is not None else ():
            take_step(engine, rows, setup.accumulation)
            assert waits is not None
            gathers = sum(wait.began is not None for wait in waits._waits)
            reductions = len(waits._waits) - gathers
            scatters = calls.get("DefaultReduceScatter", 0)
            counts.append((calls.get("DefaultAllGather", 0), gathers, scatters, reductions))
            calls.clear()
            seconds.append(waits.take_s())
            assert not waits._waits
    if not watched:
        for rows in STEPS:
            take_step(engine, rows, setup.accumulation)
    weights = whole_weights(engine)
    engine.optimizer.close()
    return counts, seconds, weights


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_every_point_at_which_the_device_would_wait_is_seen_and_nothing_changes(
    odd_llama: Path, stage: int, schedule: str
) -> None:
    setup = Setup(stage=stage, schedule=schedule, clip=1e-3, accumulation=2)
    found = run_on_ranks(2, on_a_played_device_job, odd_llama, setup, True)
    plain = run_on_ranks(2, on_a_played_device_job, odd_llama, setup, False)
    for (counts, seconds, weights), (_, _, expected) in zip(found, plain, strict=True):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        for gathers, gather_waits, scatters, reduction_waits in counts:
            assert gather_waits == gathers and (gathers > 4) == (stage > 0)
            # the end of each of the two backwards stands for its last reduce-scatters, the root's and the embedding's;
            # stages 0 and 1 reduce in the last backward only, and stage 0's all-reduces are in that wait alone
            assert reduction_waits == {3: scatters - 2, 2: scatters - 2, 1: scatters, 0: 2}[stage]
            assert (scatters > 4) == (stage > 0)
        # a gather is done before it is needed where one call follows the other; reductions are waited for
        assert all(second > 0 for second in seconds)


def test_what_the_device_has_not_passed_counts_later() -> None:
    waits = object.__new__(CollectiveWaits)
    waits._blocked, waits._base = None, at(0)  # type: ignore[assignment]
    late = at(9)
    late.passed = False
    waits._waits = deque([_Wait(at(1), at(2), at(4)), _Wait(at(5), None, late), _Wait(at(10), None, at(11))])
    assert waits.take_s() == pytest.approx(2)
    assert waits.take_s() == 0
    late.passed = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heavylift.collective_waits, "_now", lambda: at(12))
        assert waits.take_s() == pytest.approx(5)
    assert waits._base.seconds == 12  # type: ignore[union-attr]
