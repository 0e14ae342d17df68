"""Timers add up what lies between their marks; the clock is a fake one, except on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from heavylift.api import timers as module
from heavylift.api.memory_usage import memory_line, memory_usage, see_memory_usage
from heavylift.api.timers import (
    Phase,
    SynchronizedWallClockTimer,
    ThroughputTimer,
    WallClockBreakdown,
    progress_line,
    times_line,
    trim_mean,
)
from heavylift.errors import UserError

CPU = torch.device("cpu")
Advance = Callable[[float], None]


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Moves a clock, in milliseconds, that the timers read."""
    now_s = [100.0]
    monkeypatch.setattr(module, "mark_now", lambda device: now_s[0])

    def move(ms: float) -> None:
        now_s[0] += ms / 1000

    return move


def test_pairs_add_up_until_they_are_read(advance: Advance) -> None:
    timer = SynchronizedWallClockTimer(CPU)("fwd")
    for ms in (3, 4):
        timer.start()
        advance(ms)
        timer.stop()
        advance(50)
    assert timer.elapsed(reset=False) == pytest.approx(7)
    assert timer.records_ms() == pytest.approx([3, 4])
    assert timer.elapsed() == pytest.approx(7)
    assert timer.elapsed() == 0


def test_a_running_timer_is_read_and_runs_on(advance: Advance) -> None:
    timer = SynchronizedWallClockTimer(CPU)("fwd")
    timer.start()
    advance(5)
    assert timer.elapsed() == pytest.approx(5)
    advance(2)
    timer.stop()
    assert timer.elapsed() == pytest.approx(2)


def test_a_start_that_was_never_stopped_is_forgotten(advance: Advance) -> None:
    timer = SynchronizedWallClockTimer(CPU)("fwd")
    timer.start()
    advance(1000)
    timer.start()
    advance(1)
    timer.stop()
    assert timer.elapsed() == pytest.approx(1)
    with pytest.raises(UserError, match="timer fwd: stop"):
        timer.stop()


def test_a_timer_that_nobody_reads_keeps_few_marks_and_the_whole_sum(advance: Advance) -> None:
    timer = SynchronizedWallClockTimer(CPU)("fwd")
    for _ in range(3000):
        timer.start()
        advance(2)
        timer.stop()
        assert len(timer._unread) <= 128
    assert timer.elapsed(reset=False) == pytest.approx(6000)
    assert len(timer.records_ms()) == 1024


def test_means_leave_out_the_extremes(advance: Advance) -> None:
    timers = SynchronizedWallClockTimer(CPU)
    for ms in (1000, *[2] * 8, 0):
        timers("fwd").start()
        advance(ms)
        timers("fwd").stop()
    assert timers.get_mean(["fwd", "none"], normalizer=4) == {"fwd": pytest.approx(0.5)}
    assert timers.get_mean(["fwd"]) == {"fwd": 0}
    assert trim_mean([], 0.1) == 0
    assert trim_mean([3, 1, 2], 0.0) == 2


def test_log_prints_the_timers_that_exist_on_rank_0(advance: Advance, capsys: pytest.CaptureFixture[str]) -> None:
    timers = SynchronizedWallClockTimer(CPU)
    for name, ms in (("fwd", 10), ("bwd", 20)):
        timers(name).start()
        advance(ms)
        timers(name).stop()
    timers.log(["fwd", "bwd", "step"], normalizer=2, reset=False)
    assert capsys.readouterr().out == "time (ms) | fwd: 5.00 | bwd: 10.00\n"
    timers.log(["fwd"], ranks=[1])
    assert capsys.readouterr().out == ""
    assert timers("fwd").elapsed() == 0  # read, and so reset, all the same
    timers.log(["bwd"], memory_breakdown=True)
    assert "bwd: 20.00 | memory (GiB): host" in capsys.readouterr().out
    for bad in (0, -1):
        with pytest.raises(UserError, match="normalizer above 0"):
            timers.log(["bwd"], normalizer=bad)


def take_steps(breakdown: WallClockBreakdown, advance: Advance, steps: range) -> list[dict[str, float] | None]:
    """Two micro-batches per step: forward 3 ms, backward 5 of which inner 4, step as many ms as its number."""
    found = []
    for step in steps:
        for _ in range(2):
            with breakdown.measure(Phase.FORWARD):
                advance(3)
            with breakdown.measure(Phase.BACKWARD):
                with breakdown.measure(Phase.BACKWARD_INNER):
                    advance(4)
                advance(1)
        with breakdown.measure(Phase.STEP):
            advance(step)
        found.append(breakdown.step_done(step))
    return found


def test_breakdown_is_per_step_and_said_every_few_steps(advance: Advance) -> None:
    said: list[str] = []
    breakdown = WallClockBreakdown(True, CPU, steps_per_print=3, say=said.append)
    found = take_steps(breakdown, advance, range(1, 8))
    assert [step for step, times in enumerate(found, 1) if times is not None] == [3, 6]
    assert found[2] == pytest.approx({"forward": 6, "backward": 10, "backward_inner": 8, "step": 2})
    assert found[5] == pytest.approx({"forward": 6, "backward": 10, "backward_inner": 8, "step": 5})
    assert breakdown.last_ms == found[5]
    assert said[0] == "step=3 | time (ms) | forward: 6.00 | backward: 10.00 | backward_inner: 8.00 | step: 2.00"


def test_breakdown_without_a_print_interval_is_said_every_step(advance: Advance) -> None:
    said: list[str] = []
    breakdown = WallClockBreakdown(True, CPU, memory_breakdown=True, say=said.append)
    take_steps(breakdown, advance, range(1, 4))
    assert [line.split(" | ")[0] for line in said] == ["step=1", "step=2", "step=3"]
    assert all("memory (GiB): host" in line for line in said)


def test_breakdown_that_is_off_measures_and_says_nothing(advance: Advance) -> None:
    said: list[str] = []
    breakdown = WallClockBreakdown(False, CPU, say=said.append)
    assert take_steps(breakdown, advance, range(1, 4)) == [None] * 3
    assert (said, breakdown.timers.get_timers()) == ([], {})


def test_an_exception_inside_of_a_phase_passes_and_is_not_counted(advance: Advance) -> None:
    breakdown = WallClockBreakdown(True, CPU, say=lambda line: None)
    with pytest.raises(ZeroDivisionError), breakdown.measure(Phase.FORWARD):
        advance(100)
        raise ZeroDivisionError
    with breakdown.measure(Phase.FORWARD):
        advance(1)
    assert breakdown.step_done(1) == {"forward": pytest.approx(1)}


def test_throughput_leaves_out_the_first_steps_and_the_pauses(advance: Advance) -> None:
    said: list[str] = []
    timer = ThroughputTimer(batch_size=8, start_step=2, steps_per_output=4, logging_fn=said.append, device=CPU)
    assert timer.avg_samples_per_sec() == 0
    for ms in (1000, 1000, 40, 40, 10, 10):
        for micro in range(2):
            timer.start()
            advance(ms / 2)
            timer.stop(global_step=micro == 1)
            advance(500)
    # two steps of 40 ms, two of 10
    assert timer.samples_per_sec() == pytest.approx(8 / 0.010)
    assert timer.avg_samples_per_sec() == pytest.approx(4 * 8 / 0.100)
    (line,) = said
    assert line.startswith("epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=200, CurrSamplesPerSec=200, ")
    timer.stop(global_step=True)
    assert timer.global_step_count == 6
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_lines() -> None:
    assert times_line({"forward": 1.234, "step": 5}) == "time (ms) | forward: 1.23 | step: 5.00"
    line = progress_line(10, 1, [torch.tensor(0.5), 0.25], [(0.9, 0.999)] * 2)
    assert line == "step=10, skipped=1, lr=[0.5, 0.25], mom=[(0.9, 0.999), (0.9, 0.999)]"
    assert progress_line(1, 0, [1e-5], [0.9], 51.23, 0.5).endswith("mom=[0.9], grad_norm=0.5, samples/s=51.2")


def test_memory_of_the_host_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    before = memory_usage(CPU).host_resident_bytes
    block = torch.ones(2**26)  # 256 MiB, touched
    after = memory_usage(CPU).host_resident_bytes
    assert after - before > 0.9 * block.nbytes
    assert memory_usage(CPU).device_allocated_bytes == 0
    see_memory_usage("before")
    assert capsys.readouterr().out == ""
    see_memory_usage("after", force=True)
    assert capsys.readouterr().out.startswith("after | memory (GiB): ")
    assert "allocated" not in memory_line(CPU)


@pytest.mark.gpu
def test_on_cuda_the_work_is_timed_and_starting_does_not_wait() -> None:
    device = torch.device("cuda", 0)
    timers = SynchronizedWallClockTimer()
    assert timers.device == device
    work = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        work @ work
    torch.cuda.synchronize()
    timers("short").start()
    work @ work
    timers("short").stop()
    timers("long").start()
    for _ in range(40):
        work @ work
    timers("long").stop()
    assert not torch.cuda.current_stream().query(), "stop() has waited for the device"
    times_ms = timers.elapsed(["short", "long"])
    assert times_ms["long"] > 5 * times_ms["short"] > 0
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert memory_usage(device).device_allocated_bytes >= block.nbytes
    assert "allocated" in memory_line(device)
