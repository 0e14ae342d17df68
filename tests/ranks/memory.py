"""Resident memory of this process, measured around an action."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def status_bytes(key: str) -> int:
    """`VmRSS`, `VmHWM` (peak of the former) or another size of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


@dataclass(frozen=True)
class Growth:
    """Bytes more than before an action."""

    peak: int
    """Resident at the peak, mapped pages of files included. Those are shared, and the kernel maps more around the
    pages that are read: up to twice as many."""
    kept: int
    """Resident afterwards, without pages of files."""
    result: Any
    """What the action returned."""


def measure(action: Callable[[], Any]) -> Growth:
    """Runs `action` and says what it took."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS, see proc(5)
    resident, own = status_bytes("VmRSS"), status_bytes("RssAnon")
    result = action()
    gc.collect()
    return Growth(status_bytes("VmHWM") - resident, status_bytes("RssAnon") - own, result)
