"""Lets gloo's threads put down what they hold before the interpreter goes.

A gloo thread that has done a collective lets go of its tensors after it has told whoever waits for it, and for that it
may need Python's lock. On a busy machine the program can be over by then: Python ends threads that come back to it late
by unwinding them, which C++ answers with `terminate called without an active exception`, exit code 134 after a run that
was good (seen with torch 2.13, 4 times in 39 on two loaded cores). Destroying the process group does not help while a
device mesh still holds it.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

GLOO_THREAD = "pt_gloo_runloop"
"""What torch calls them (ProcessGroupGloo.cpp); the kernel keeps 15 letters."""
PATIENCE_S = 2.0


def wait_at_exit() -> None:
    """From here on this process waits for gloo's threads when it ends. Calls after the first do nothing."""
    atexit.unregister(wait_until_idle)
    atexit.register(wait_until_idle)


def wait_until_idle(patience_s: float = PATIENCE_S) -> bool:
    """Sleeps, without Python's lock, until no gloo thread of this process is at work; whether that came in time.

    A thread that sleeps waits for work: nobody else holds the lock meanwhile. Elsewhere than on Linux True at once.
    """
    end_s = time.monotonic() + patience_s
    while True:
        time.sleep(0.002)  # also before the first look: a thread that waits for the lock sleeps too, and gets it now
        if not _any_at_work():
            return True
        if time.monotonic() > end_s:
            return False


def _any_at_work() -> bool:
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() != GLOO_THREAD[:15]:
                continue
            # "123 (name) S 1 ...": the state follows the last parenthesis
            if (task / "stat").read_text().rpartition(")")[2].split()[0] != "S":
                return True
        except (OSError, IndexError):
            continue  # it has ended meanwhile
    return False
