"""Where the time of a step goes: ranges measured on the host, by whoever does the work or waits for it.

Each range says what was done, for which group, from when to when and on which thread. `take` hands them over and
forgets them; the reader adds them up (`heavylift.train.waits`) or draws them (`heavylift.train.trace`). What the GPU
does is not seen here, but for one thing: how long an all-gather waited at a gate (`heavylift.offload.gates`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

MAX_RANGES = 65536
"""An optimizer that nobody asks for its ranges keeps so many of the last ones (about 10 MB)."""


class Activity(StrEnum):
    """What a range is about."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer step"
    """The call of `step()` in the training loop's thread."""
    GATE = "gate"
    """A reader's thread is blocked until the copy of the updated shard has been issued."""
    DRAIN = "drain"
    """A thread is blocked until the worker has nothing left to do."""
    GRADIENT = "wait for gradient"
    """For the gradient to be computed and copied down."""
    ACCUMULATE = "accumulate"
    """A gradient is added to the sum on the host: on the worker, or with its copy down inside backward."""
    SLOT = "wait for slot"
    """On the worker, without the compiled kernel: for the copy up that last used the place in the ring. In the training
    loop's thread: for the addition of the gradient that is still in the slot."""
    ADAMW = "adamw"
    """The CPU kernel: a step, a correction or an undoing."""
    FETCH = "copy down"
    """The CPU has nothing to step, as it is still on its way down: gradients that stay on the device until their turn
    comes, parameters that are half of split masters. Beside a GPU also for a free place in the ring."""
    STREAM = "streamed step"
    """A group's states are copied up, stepped on the GPU and copied home. Measured by the thread that issues it, which
    is ahead of the bus by the ring of slots at most."""
    ISSUE = "issue copy"
    """The copies up are handed to the GPU, where the compiled kernel does not do that itself; on a machine without one,
    they are done."""


@dataclass(frozen=True, slots=True)
class Range:
    """One activity, finished."""

    activity: Activity
    label: str
    """The group's name where there is one."""
    start_s: float
    """`time.perf_counter()`."""
    stop_s: float
    thread: int
    """The operating system's thread id."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class ThreadSpan:
    """A thread of the compiled kernel had work: some part of the range that its caller measured."""

    thread: int
    """The operating system's thread id."""
    start_s: float
    """`time.perf_counter()`."""
    stop_s: float


class Timeline:
    """Collects ranges from all threads."""

    def __init__(self) -> None:
        # appending and popping at the ends of a deque are atomic
        self._ranges: deque[Range] = deque(maxlen=MAX_RANGES)

    def add(self, activity: Activity, label: str, start_s: float, stop_s: float | None = None) -> None:
        """A range of the calling thread, from `start_s` to `stop_s` (`time.perf_counter()`; None: now)."""
        stop_s = time.perf_counter() if stop_s is None else stop_s
        self._ranges.append(Range(activity, label, start_s, stop_s, threading.get_native_id()))

    @contextmanager
    def measure(self, activity: Activity, label: str = "") -> Iterator[None]:
        """A range around a block, also where it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(activity, label, start_s)

    def take(self) -> list[Range]:
        """All ranges that ended since the last call, in the order in which they ended."""
        taken = []
        while self._ranges:
            taken.append(self._ranges.popleft())
        return taken
