"""What the operating system calls the threads of the CPU step: `top -H` and `ps -L` show it, and the launcher looks for
it when it gives these threads their part of cache and memory bandwidth. No torch here.
"""

from __future__ import annotations

from pathlib import Path

STEP_THREAD = "heavylift-step"
"""Steps the host's groups one after another."""
BUS_THREAD = "heavylift-bus"
"""Moves the states that the GPU steps on their way."""
POOL_THREAD = "heavylift-cpu"
"""One of the compiled kernel's own, which `native/thread_pool.h` names so."""
STEP_THREADS = (STEP_THREAD, BUS_THREAD, POOL_THREAD)


def name_thread(thread_id: int, name: str) -> None:
    """Tells Linux the name of a thread of this process, at most 15 letters; elsewhere nothing happens.

    `thread_id`: the operating system's. `threading` does so itself from Python 3.14 on.
    """
    assert len(name.encode()) <= 15, name  # the kernel would cut it
    try:
        Path(f"/proc/self/task/{thread_id}/comm").write_text(name)
    except OSError:
        pass
