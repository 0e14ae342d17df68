"""One thread that does the host's steps, beside the thread that trains.

The thread knows only its queue of tasks: when whoever owns the `Worker` is garbage, so is the worker, and the thread
ends after the tasks it has. A thread that held its owner would keep it, and every state in it, for ever.

A program may end while a step is still being done: the last one has no forward after it that would wait. Python ends
threads that come back to it late by unwinding them, which C++ code on their stack answers with `terminate`: exit code
134 after a run that was good. So threads are waited for while the interpreter is whole (`_end_all`).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from heavylift.offload.gates import Gate
from heavylift.offload.thread_names import STEP_THREAD, name_thread
from heavylift.offload.timeline import Activity, Timeline

_PATIENCE_S = 30.0
"""At the end of a program: a task may wait for a device, or for another rank, that never comes."""


@dataclass(frozen=True)
class _Task:
    """Work on one group."""

    place: int
    """The group's place in the forward order."""
    gate: Gate
    run: Callable[[], None]
    arrived: Callable[[], bool] | None
    """Of a task that came in backward, as long as backward goes on: whether it could be done without waiting."""


class _Queue:
    """Tasks that wait, and what became of those that were done. Shared by the worker and its thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[_Task] = []
        self.num_pending = 0
        """Tasks waiting or at work."""
        self.closed = False
        self.error: BaseException | None = None

    def next(self) -> _Task | None:
        """The next task; None when there will be none."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closed)
            return self.waiting.pop(self._choose()) if self.waiting else None

    def _choose(self) -> int:
        """Place of the next task among those that wait: the newest that has arrived, else the oldest.

        Where backward brings gradients faster than they are stepped, something is left over at its end. Oldest first,
        that would be the first layers, which the next forward needs at once; newest first, it is some of the later
        ones, which have most of the forward left.
        """
        for place in reversed(range(len(self.waiting))):
            arrived = self.waiting[place].arrived
            try:
                if arrived is not None and arrived():
                    return place
            except Exception:
                return place  # the device has failed: the task meets the same, and there it is told
        return 0

    def do(self, task: _Task) -> None:
        """Does a task, or only opens its gate where one before it failed."""
        try:
            if self.error is None:
                task.run()
        except BaseException as error:  # told to the main thread, which ends the run
            self.error = error
        if self.error is not None:
            # also for the tasks after the one that failed: a reader would wait for them for ever
            task.gate.open(None, self.error)

    def done(self) -> None:
        """One task less."""
        with self.changed:
            self.num_pending -= 1
            self.changed.notify_all()

    def close(self) -> None:
        """No more tasks will come."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


_threads: weakref.WeakKeyDictionary[threading.Thread, _Queue] = weakref.WeakKeyDictionary()
"""Those that have been started."""


def _end_all() -> None:
    """Ends all threads after the tasks they have."""
    running = [(thread, queue) for thread, queue in _threads.items() if thread.is_alive()]
    for _, queue in running:
        queue.close()
    for thread, _ in running:
        thread.join(_PATIENCE_S)


atexit.register(_end_all)


def _work(queue: _Queue, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_grad_enabled(False)  # grad mode is per thread
    while (task := queue.next()) is not None:
        queue.do(task)
        # not while waiting for the next one: a task leads to the optimizer and all its memory
        del task
        queue.done()


class Worker:
    """Runs tasks in the order in which they came, those of backward newest first, or in forward order when told so.

    The CPU kernel inside them releases the GIL.
    """

    def __init__(self, device: torch.device, timeline: Timeline, name: str = STEP_THREAD) -> None:
        """`name`: of the thread, for the operating system too."""
        self._timeline = timeline
        self._queue = _Queue()
        self._thread = threading.Thread(target=_work, args=(self._queue, device), name=name, daemon=True)
        _threads[self._thread] = self._queue
        self._thread.start()
        self.thread_id = self._thread.native_id
        """The operating system's id of the thread."""
        assert self.thread_id is not None
        name_thread(self.thread_id, name)
        weakref.finalize(self, self._queue.close)

    def submit(
        self, place: int, gate: Gate, run: Callable[[], None], arrived: Callable[[], bool] | None = None
    ) -> None:
        """Closes `gate` and runs `run`, whose last act is to open it, after the tasks before it.

        `place`: of the group in the forward order. `arrived`: of a group's only task in backward, asked from the
        worker's thread; the newest for which it is true is done first. When a task fails, its gate and those of all
        later tasks are opened with its error.
        """
        gate.close()
        queue = self._queue
        with queue.changed:
            queue.num_pending += 1
            queue.waiting.append(_Task(place, gate, run, arrived))
            queue.changed.notify_all()

    def turn_to_forward_order(self) -> None:
        """Backward is over: what is left is done in the order in which the next forward wants it.

        Tasks came in backward order, so the first group of the forward would be the last to be done, and the forward
        would stand still for all that is left. Tasks of one group keep their order.
        """
        queue = self._queue
        with queue.changed:
            queue.waiting = [replace(task, arrived=None) for task in sorted(queue.waiting, key=lambda task: task.place)]

    @property
    def num_pending(self) -> int:
        """Tasks waiting or at work."""
        return self._queue.num_pending

    def drain(self) -> None:
        """Waits until nothing is left to do. Raises what a task raised."""
        queue = self._queue
        if queue.num_pending:
            with self._timeline.measure(Activity.DRAIN), queue.changed:
                queue.changed.wait_for(lambda: queue.num_pending == 0)
        if queue.error is not None:
            raise RuntimeError("the optimizer step on the host failed") from queue.error

    def close(self) -> None:
        """Ends the thread after its tasks."""
        self._queue.close()
        self._thread.join()
