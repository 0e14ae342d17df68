"""Where a step's time goes: ranges, what is hidden, the trace file; and that the optimizer's overlap shows in it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import command_env

from heavylift.config.schema import Schedule
from heavylift.offload import native
from heavylift.offload.gates import Gate
from heavylift.offload.timeline import Activity, Range, ThreadSpan, Timeline
from heavylift.train.trace import draw
from heavylift.train.waits import WaitWatch, shared_seconds, waits_text

ROOT = Path(__file__).parents[1]
MAIN, WORKER, BUS = 11, 12, 13


def made(activity: Activity, start_s: float, stop_s: float, thread: int = WORKER, label: str = "g") -> Range:
    return Range(activity, label, start_s, stop_s, thread)


class TestTimeline:
    def test_ranges_of_all_threads_are_taken_once(self) -> None:
        timeline = Timeline()

        def work() -> None:
            with timeline.measure(Activity.ADAMW, "layer"):
                pass

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(KeyError), timeline.measure(Activity.BACKWARD):
            raise KeyError
        one, other = timeline.take()
        assert (one.activity, one.label, other.activity, other.label) == (
            Activity.ADAMW,
            "layer",
            Activity.BACKWARD,
            "",
        )
        assert one.thread == thread.native_id and other.thread == threading.get_native_id()
        assert one.start_s <= one.stop_s <= other.stop_s
        assert timeline.take() == []

    def test_only_a_closed_gate_is_a_wait(self) -> None:
        timeline, gate = Timeline(), Gate()
        gate.observe(timeline, "layer")
        gate.wait()
        assert timeline.take() == []
        gate.close()

        def open_once_somebody_waits() -> None:
            while not gate._condition._waiters:  # type: ignore[attr-defined]
                time.sleep(0.001)
            gate.open(None)

        thread = threading.Thread(target=open_once_somebody_waits)
        thread.start()
        gate.wait()
        thread.join()
        [waited] = timeline.take()
        assert (waited.activity, waited.label) == (Activity.GATE, "layer")
        assert gate.waited_s > 0 and gate.take_device_wait_s() == 0


@pytest.mark.gpu
def test_a_reader_s_stream_is_timed_by_the_device() -> None:
    import torch

    gate, timeline, side = Gate(), Timeline(), torch.cuda.Stream()
    gate.observe(timeline, "layer")
    waited_s: list[float] = []
    for cycles in (200_000_000, 0):  # about 0.1 s, and nothing
        gate.close()
        with torch.cuda.stream(side):
            if cycles:
                torch.cuda._sleep(cycles)
        gate.open(side.record_event())
        gate.wait()
        torch.cuda.synchronize()
        waited_s.append(gate.take_device_wait_s())
        gate.wait()  # a second reader finds it open
        assert gate.take_device_wait_s() == 0
    assert waited_s[0] > waited_s[1] >= 0
    assert timeline.take() == [], "the thread itself never waited"


class TestWaits:
    def test_hidden_is_the_share_of_work_that_nobody_waited_for(self) -> None:
        watch = WaitWatch((WORKER,))
        ranges = [
            made(Activity.GRADIENT, 0, 10),  # no work, however long
            made(Activity.SLOT, 10, 11),
            made(Activity.ADAMW, 11, 17),
            made(Activity.ISSUE, 17, 18),
            made(Activity.GATE, 9, 12, MAIN),  # waits for 2 s of work
            made(Activity.DRAIN, 17.5, 20, MAIN),  # and for half a second
        ]
        waits = watch.step(3, Schedule.SPECULATIVE, ranges, 0.25)
        assert (waits.step, waits.schedule, waits.gate_device_s) == (3, "speculative", 0.25)
        assert (waits.cpu_s, waits.slot_s, waits.issue_s, waits.gradient_s) == (6, 1, 1, 10)
        assert (waits.gate_s, waits.drain_s) == (3, 2.5)
        assert waits.exposed_s == 2.5 and waits.hidden == pytest.approx(1 - 2.5 / 8)
        assert waits_text(waits) == "offload: cpu 6.00s d2h 10.00s h2d 2.00s hidden 69% gate 5.50s"

    def test_work_that_ends_in_the_next_step_was_waited_for_in_this_one(self) -> None:
        watch = WaitWatch((WORKER,))
        assert watch.step(1, Schedule.DEFERRED, [made(Activity.GATE, 5, 7, MAIN)], 0).hidden is None
        waits = watch.step(2, Schedule.DEFERRED, [made(Activity.ADAMW, 4, 8)], 0)
        assert (waits.exposed_s, waits.hidden) == (2, 0.5)
        assert watch.step(3, Schedule.DEFERRED, [made(Activity.ADAMW, 5, 7)], 0).hidden == 1, "long gone"

    def test_two_threads_are_hidden_each_by_itself(self) -> None:
        ranges = [
            made(Activity.ADAMW, 0, 4),
            made(Activity.STREAM, 1, 5, BUS),
            made(Activity.GATE, 3, 5, MAIN),  # waits for 1 s of the one and 2 s of the other
        ]
        waits = WaitWatch((WORKER, BUS)).step(1, Schedule.DEFERRED, ranges, 0)
        assert (waits.cpu_s, waits.stream_s, waits.exposed_s) == (4, 4, 3)
        assert waits_text(waits) == "offload: cpu 4.00s bus 4.00s d2h 0.00s h2d 0.00s hidden 62% gate 2.00s"

    def test_work_in_the_training_thread_is_never_hidden(self) -> None:
        accumulated = [made(Activity.ACCUMULATE, 0, 1, MAIN), made(Activity.ADAMW, 2, 5)]
        assert WaitWatch((WORKER,)).step(1, Schedule.DEFERRED, accumulated, 0).hidden == 0.75
        assert WaitWatch(()).step(1, Schedule.SYNCHRONOUS, [made(Activity.ADAMW, 2, 5, MAIN)], 0).hidden == 0

    def test_shared_seconds(self) -> None:
        ones = [made(Activity.ADAMW, 0, 2), made(Activity.ADAMW, 3, 4)]
        assert shared_seconds(ones, [made(Activity.GATE, 1, 3.5)]) == 1.5
        assert shared_seconds(ones, [made(Activity.GATE, 2, 3)]) == 0
        assert shared_seconds(ones, []) == 0


def test_ranges_and_names_are_drawn_into_a_trace() -> None:
    clock = {"ph": "X", "name": "heavylift clock", "pid": 7, "tid": MAIN, "ts": 5000.0, "dur": 1.0}
    work = [
        {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": 1, "dur": dur}
        for cat, name, stream, dur in [
            ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 1000),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 24, 500),
            ("gpu_memset", "Memset (Device)", 24, 3),
            # as a run on a GPU has them: the loss comes down on the stream that computes
            ("kernel", "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopA_NNT", 7, 900),
            ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 8),
            ("kernel", "void at::native::vectorized_elementwise_kernel<4, ...>", 29, 70),
            ("kernel", "_sum_squares_kernel", 29, 10),
            ("kernel", "_adamw_kernel", 17, 17),
            ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 31, 40),
            ("kernel", "void at::native::fill", 33, 2),
        ]
    ]
    old = {"ph": "M", "name": "thread_name", "pid": 7, "tid": WORKER, "args": {"name": "thread 12 (python)"}}
    events: list[dict[str, Any]] = [old, clock, *work]
    before, after = made(Activity.ADAMW, 0.5, 1.5), made(Activity.ADAMW, 2.001, 2.003, label="layers.7")
    draw(events, [before, after], [], 2.0, {MAIN: "training", WORKER: "optimizer worker"})
    [drawn] = [event for event in events if event.get("cat") == "heavylift"]
    assert (drawn["name"], drawn["pid"], drawn["tid"]) == ("adamw layers.7", 7, WORKER)
    assert (drawn["ts"], drawn["dur"]) == (pytest.approx(6000), pytest.approx(2000)), "microseconds on the file's clock"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert old not in events
    assert names == {
        (7, MAIN): "heavylift training",
        (7, WORKER): "heavylift optimizer worker",
        (0, 20): "stream 20: copies down to the host",
        (0, 24): "stream 24: copies up to the device",
        (0, 7): "stream 7: forward and backward",
        (0, 29): "stream 29: reduced gradients",
        (0, 17): "stream 17: optimizer steps",
        (0, 31): "stream 31: collectives",
        (0, 33): "stream 33: other kernels",
    }


def test_the_kernel_s_threads_have_lanes_of_their_own() -> None:
    clock = {"ph": "X", "name": "heavylift clock", "pid": 7, "tid": MAIN, "ts": 0.0, "dur": 1.0}
    calls = [
        made(Activity.ADAMW, 1, 3, label="layers.1"),
        made(Activity.FETCH, 3, 4, label="layers.1"),  # of the same call: its waits are told at its end
        made(Activity.ACCUMULATE, 5, 6, label="layers.0"),
        made(Activity.GATE, 1, 9, MAIN, label="layers.9"),  # no call of the kernel
    ]
    spans = [
        ThreadSpan(101, 1.1, 2.9),
        ThreadSpan(101, 3.2, 3.9),
        ThreadSpan(101, 5.1, 5.9),
        ThreadSpan(100, 1.2, 3.5),
        ThreadSpan(100, 7, 8),  # of a call that has not ended
    ]
    events: list[dict[str, Any]] = [clock]
    draw(events, calls, spans, 0.0, {MAIN: "training", WORKER: "optimizer worker"})
    lanes = {tid: [e["name"] for e in events if e.get("tid") == tid and e["ph"] == "X"] for tid in (100, 101)}
    assert lanes == {
        101: ["adamw layers.1", "adamw layers.1", "accumulate layers.0"],
        100: ["adamw layers.1", "CPU kernel"],
    }
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert (names[101], names[100]) == ("heavylift CPU thread 0", "heavylift CPU thread 1")


# the worker of a run, with a CPU step so slow that the next forward has to wait for it
SLOW_WORKER = """
import sys, time
from heavylift.offload import kernels
for kernel in (kernels.NativeKernel, kernels.PlainKernel):
    def slow(self, *args, step=kernel.step):
        time.sleep(0.05)
        step(self, *args)
    kernel.step = slow
from heavylift.train.worker import main
main(sys.argv[1:])
"""


def profiled_run(folder: Path, name: str, num_steps: int, **sections: dict[str, object]) -> Path:
    """A run of a tiny shape in one process; returns its run folder."""
    recipe: dict[str, dict[str, object]] = {
        "model": {"model_name_or_path": str(ROOT / "examples/shapes/tiny_llama"), "init": "random"},
        "data": {"format": "random", "cutoff_len": 32, "num_samples": 8},
        "train": {"output_dir": str(folder / name), "max_steps": num_steps, "max_grad_norm": 0, "profile": True},
        "engine": {"offload_optimizer": "host", "schedule": "speculative"},
        "export": {"save": False},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = command_env(**ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_USE_AGENT_STORE="False")
    done = subprocess.run(
        [sys.executable, "-c", SLOW_WORKER, str(path)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder / name


def test_the_trace_of_a_run_shows_the_overlap(tmp_path: Path) -> None:
    run = profiled_run(tmp_path, "run", 6)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event.get("cat") == "heavylift"]

    def begun_with(name: str) -> list[dict[str, Any]]:
        return [event for event in drawn if event["name"].startswith(name)]

    def end(event: dict[str, Any]) -> float:
        return float(event["ts"]) + float(event["dur"])

    [training] = {event["tid"] for event in begun_with("backward")}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    pid = drawn[0]["pid"]
    stepping = {names[pid, event["tid"]] for event in begun_with("adamw")}
    assert names[pid, training] == "heavylift training" and "heavylift optimizer worker" in stepping
    assert all(name.startswith("heavylift CPU thread ") for name in stepping - {"heavylift optimizer worker"})
    # small groups are stepped by their caller; the head is not small
    pool = [event for event in begun_with("adamw lm_head") if names[pid, event["tid"]].startswith("heavylift CPU")]
    assert bool(pool) == (native.load() is not None)
    # three steps: 3 to 5
    assert len(begun_with("backward")) == len(begun_with("forward")) == len(begun_with("optimizer step")) == 3
    early = [
        step
        for backward in begun_with("backward")
        for step in begun_with("adamw")
        if backward["ts"] < step["ts"] < end(backward)
    ]
    assert early, "a CPU step begins before backward ends"
    assert {"adamw model.layers.0", "adamw lm_head"} <= {event["name"] for event in begun_with("adamw")}
    # the next forward waits at the gates of groups that are stepped last
    forwards = begun_with("forward")
    gates = [e for e in begun_with("gate ") if any(f["ts"] <= e["ts"] and end(e) <= end(f) + 1 for f in forwards)]
    assert gates and {event["tid"] for event in gates} == {training}
    # the operators of torch lie on the same clock
    operators = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::mm" and e["tid"] == training]
    inside = [e for e in operators if any(f["ts"] <= e["ts"] and end(e) <= end(f) + 1 for f in forwards)]
    assert inside


def test_waits_are_written_and_a_short_run_has_a_trace(tmp_path: Path) -> None:
    run = profiled_run(tmp_path, "run", 2, engine={"offload_optimizer": "host", "schedule": "deferred"})
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["name"] == "backward" and event["cat"] == "heavylift"]) == 1
    first, second = (json.loads(line) for line in (run / "waits.jsonl").read_text().splitlines())
    assert (first["step"], second["step"], second["schedule"]) == (1, 2, "deferred")
    # the second forward waits for steps that sleep
    assert second["cpu_s"] > 0 and second["gate_s"] > 0 and second["exposed_s"] > 0
    assert 0 <= second["hidden"] < 1 and second["gate_device_s"] == 0


@pytest.mark.soak
def test_no_host_tier_no_waits(tmp_path: Path) -> None:
    run = profiled_run(tmp_path, "run", 1, engine={})
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "trace.json", "config.yaml", "loss.png"}
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert [event for event in trace if event["name"] == "backward"]
