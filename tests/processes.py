"""Whether processes that a test started have ended."""

from __future__ import annotations

import time

import psutil


def gone(pids: list[int], within_s: float = 60) -> bool:
    """Whether all of them end in time; one that nobody has waited for yet counts as ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False
