"""Was it the kernel that killed a process, for want of memory? Counters of such kills, read before and after.

The control group's own counter is exact; `/proc/vmstat` counts the whole machine and is asked where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heavylift.units import GIB

# version 1's way of saying "no limit" is a number close to 2^63
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class OomCount:
    """Kills for memory so far; None where the kernel does not tell."""

    group: int | None
    machine: int | None
    limit_bytes: int | None
    """Memory limit of the control group."""


def read_oom_count(root: Path = Path("/")) -> OomCount:
    """Reads the counters of this process's control group (version 2 or 1) and of the machine."""
    group, limit = None, None
    for folder, events, limit_name in _memory_groups(root):
        group = _counter(folder / events)
        limit = _number(folder / limit_name)
        if group is not None:
            break
    return OomCount(group, _counter(root / "proc/vmstat"), limit)


def explain_kill(before: OomCount, after: OomCount) -> str:
    """What a SIGKILL between the two readings was about, as the end of a sentence."""
    if before.group is not None and after.group is not None:
        if after.group > before.group:
            limit = f" of {after.limit_bytes / GIB:.1f} GiB" if after.limit_bytes else ""
            return f": out of memory, the kernel ended it at the control group's limit{limit}"
        if after.machine is not None and before.machine is not None and after.machine > before.machine:
            return ": out of memory, the kernel ended a process because the machine's memory was full"
        return "; the kernel counted no kill for memory, so somebody or something sent the signal"
    if before.machine is not None and after.machine is not None:
        if after.machine > before.machine:
            return ": out of memory, the kernel ended a process because the machine's memory was full"
        return "; the kernel counted no kill for memory, so somebody or something sent the signal"
    return ": out of memory?"


def _memory_groups(root: Path) -> list[tuple[Path, str, str]]:
    """Folders of this process's memory control group with the names of counter and limit, the likeliest first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.events", "memory.max")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.oom_control", "memory.limit_in_bytes")
        else:
            continue
        # inside a container the path may be the host's: its own group then stands at the mount point
        found += [(base / group.lstrip("/"), *names), (base, *names)]
    return found


def _counter(file: Path) -> int | None:
    try:
        values = dict(line.split() for line in file.read_text().splitlines())
        return int(values["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _number(file: Path) -> int | None:
    try:
        value = int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return value if value < _NO_LIMIT else None
