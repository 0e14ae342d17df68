"""How much CPU this process's machine lends: the affinity mask, the control group's quota, what the two come to."""

from __future__ import annotations

import math
import os
from pathlib import Path

from heavylift.launch.placement import parse_places

PLACES_VARIABLE = "HEAVYLIFT_PLACES"
"""The table of all ranks' places (`placement.dump_places`), from the launcher to its workers."""
BIND_VARIABLE = "HEAVYLIFT_BIND"
"""1: each worker is bound to its place."""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control group (version 1 or 2) grants, None without a limit.

    `root` is where /proc and /sys are found. The tightest limit on the way up to the top group counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup" / controllers, _quota_v1
            base = base if base.is_dir() else root / "sys/fs/cgroup/cpu"
        else:
            continue
        folder = base / group.lstrip("/")
        # inside a container the path may be the host's: its own limit then stands at the mount point
        steps = [folder, *folder.parents]
        quotas += [q for step in steps if step.is_relative_to(base) and (q := read(step)) is not None]
    return min(quotas, default=None)


def allowed_cpus() -> list[int]:
    """CPU numbers that all ranks of this machine together may run on, ascending.

    That is this process's affinity mask, except in a rank that the launcher has bound to its own part of it.
    """
    if os.environ.get(BIND_VARIABLE) == "1" and (table := os.environ.get(PLACES_VARIABLE)):
        return sorted({cpu for place in parse_places(table) for cpu in place.cpus})
    return sorted(os.sched_getaffinity(0))


def num_usable_cores() -> int:
    """Cores that can really be busy at once: the allowed ones, or fewer by quota. At least one."""
    quota = cpu_quota()
    allowed = len(allowed_cpus())
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
