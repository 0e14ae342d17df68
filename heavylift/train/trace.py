"""`train.profile`: a picture of three steps on rank 0 for chrome://tracing or ui.perfetto.dev.

`torch.profiler` records the operators, and on a GPU its kernels and copies. It does not look into the optimizer's
worker thread, so the ranges of `heavylift.offload.timeline` are drawn into its file afterwards: the CPU steps of the
groups, what they waited for, the gates, and forward, backward and step of the training thread; and for every thread of
the compiled kernel when it had work. Lanes are named: the threads, and every stream of the GPUs by what it does most of
its time.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from heavylift.offload.timeline import Activity, Range, ThreadSpan

FIRST_STEP, LAST_STEP = 3, 5
"""Steps that are recorded, counted from 1; a shorter run's last step is always among them."""
_CLOCK = "heavylift clock"
_CATEGORY = "heavylift"
Event = dict[str, Any]


class Tracer:
    """Records from the first of the steps to the last and writes the file. On rank 0 only."""

    def __init__(self, path: Path, num_steps: int, worker_threads: Mapping[int, str]) -> None:
        """`worker_threads`: what each thread beside the training one does (`TieredAdamW.worker_threads`)."""
        self._path = path
        self._first, self._last = min(FIRST_STEP, num_steps), min(LAST_STEP, num_steps)
        self._threads = {threading.get_native_id(): "training", **worker_threads}
        self._profile: profile | None = None
        self._ranges: list[Range] = []
        self._spans: list[ThreadSpan] = []
        self._clock_s = 0.0

    def begin_step(self, step: int) -> bool:
        """Before step `step`, counted from 1. Returns whether it began to record, which takes long."""
        if step != self._first:
            return False
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._clock_s = time.perf_counter()
        # the profiler's clock is not ours: this range is in both
        with record_function(_CLOCK):
            pass
        return True

    def end_step(self, step: int, ranges: Sequence[Range], spans: Sequence[ThreadSpan]) -> bool:
        """After step `step`. `ranges`, `spans`: all that ended since the step before; those that began earlier too are
        drawn.

        Returns whether it wrote the file, which takes long."""
        if self._profile is None:
            return False
        self._ranges += ranges
        self._spans += spans
        if step == self._last:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            trace = json.loads(self._path.read_text(encoding="utf-8"))
            draw(trace["traceEvents"], self._ranges, self._spans, self._clock_s, self._threads)
            self._path.write_text(json.dumps(trace), encoding="utf-8")
            return True
        return False


def draw(
    events: list[Event],
    ranges: Sequence[Range],
    spans: Sequence[ThreadSpan],
    clock_s: float,
    threads: dict[int, str],
) -> None:
    """Adds `ranges`, `spans` and the names of lanes to a Chrome trace that holds the clock's range.

    `clock_s`: `time.perf_counter()` when that range began. Times in the file are microseconds.
    """
    [clock] = [event for event in events if event.get("name") == _CLOCK and event.get("ph") == "X"]
    zero_us = float(clock["ts"]) - clock_s * 1e6
    lanes = [(f"{r.activity} {r.label}".rstrip(), r.thread, r.start_s, r.stop_s) for r in ranges]
    lanes += [(name, span.thread, span.start_s, span.stop_s) for name, span in _named(spans, ranges)]
    events += [
        {
            "ph": "X",
            "cat": _CATEGORY,
            "name": name,
            "pid": clock["pid"],
            "tid": thread,
            "ts": zero_us + start_s * 1e6,
            "dur": (stop_s - start_s) * 1e6,
        }
        for name, thread, start_s, stop_s in lanes
        if start_s >= clock_s
    ]
    seen = {r.thread for r in ranges}
    names = {(clock["pid"], tid): f"heavylift {threads.get(tid, 'backward')}" for tid in seen | set(threads)}
    pool = dict.fromkeys(span.thread for span in spans)  # in the pool's order
    names |= {(clock["pid"], tid): f"heavylift CPU thread {number}" for number, tid in enumerate(pool)}
    names |= _streams(events)
    _name_lanes(events, names)


def _named(spans: Sequence[ThreadSpan], ranges: Sequence[Range]) -> list[tuple[str, ThreadSpan]]:
    """Each span with the name of the call that it was part of: calls come one after the other."""
    calls = sorted((r for r in ranges if r.activity in _KERNEL_CALLS), key=lambda r: r.start_s)
    starts = [r.start_s for r in calls]
    named = []
    for span in spans:
        place = bisect_right(starts, span.stop_s) - 1
        call = calls[place] if place >= 0 and span.start_s <= calls[place].stop_s else None
        # a call through which pieces came down is told as two ranges, its work and its waits
        activity = Activity.ADAMW if call is None or call.activity is Activity.FETCH else call.activity
        named.append((f"{activity} {call.label}".rstrip() if call is not None else "CPU kernel", span))
    return named


_KERNEL_CALLS = (Activity.ADAMW, Activity.FETCH, Activity.ACCUMULATE)
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_UP, _DOWN, _KERNELS = "copies up to the device", "copies down to the host", "other kernels"
# by what a kernel's name holds; Triton's kernels are named as in `heavylift/offload/fused_kernels.py`
_ROLES = (
    ("nccl", "collectives"),
    ("adamw_", "optimizer steps"),
    ("revise_kernel", "optimizer steps"),
    ("sum_squares_kernel", "reduced gradients"),
)


def _streams(events: Sequence[Event]) -> dict[tuple[Any, Any], str]:
    """Names for the lanes of the GPUs' streams, by what they spend most of their time on."""
    spent: dict[tuple[Any, Any], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.get("cat") in _GPU_WORK:
            spent[event["pid"], event["tid"]][_role(event)] += float(event["dur"])
    names = {lane: max(roles, key=lambda role: roles[role]) for lane, roles in spent.items()}
    for lane, roles in spent.items():
        if names[lane] == _KERNELS and "reduced gradients" in roles:
            names[lane] = "reduced gradients"  # most of it casts them
    for pid in {pid for pid, _ in spent}:
        # the busiest stream of a device is the one that computes
        _, lane = max((roles[_KERNELS], lane) for lane, roles in spent.items() if lane[0] == pid)
        if spent[lane][_KERNELS] > 0:
            names[lane] = "forward and backward"
    return {lane: f"stream {lane[1]}: {name}" for lane, name in names.items()}


def _role(event: Event) -> str:
    name = str(event.get("name", ""))
    if event["cat"] == "gpu_memcpy":
        return _UP if "HtoD" in name else _DOWN if "DtoH" in name else _KERNELS
    return next((role for part, role in _ROLES if part in name.lower()), _KERNELS)


def _name_lanes(events: list[Event], names: dict[tuple[Any, Any], str]) -> None:
    """Replaces the names that these lanes may have."""
    events[:] = [
        event
        for event in events
        if not (event.get("name") == "thread_name" and (event.get("pid"), event.get("tid")) in names)
    ]
    for (pid, tid), name in names.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
