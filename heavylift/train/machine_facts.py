"""The machine and the versions that a benchmark's numbers belong to. Facts that cannot be found are None."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from heavylift.launch.cores import num_usable_cores
from heavylift.memory.machine import host_available_bytes
from heavylift.units import GIB

_PACKAGE = Path(__file__).parents[1]


def machine_facts() -> dict[str, Any]:
    """GPUs, cores and memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "gpu_gib": torch.cuda.get_device_properties(0).total_memory / GIB if count else None,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": num_usable_cores(),
        "host_gib": psutil.virtual_memory().total / GIB,
        "host_available_gib": host_available_bytes() / GIB,
        "system": platform.platform(),
    }


def version_facts() -> dict[str, Any]:
    """Versions of what computes, and the commit of this package where it is a git checkout."""
    return {
        "heavylift": _version("heavylift"),
        "git_commit": git_commit(_PACKAGE.parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": _driver(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with `+` where files under version control have been changed since."""
    if not (folder / ".git").exists():
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed else "")


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return drivers.splitlines()[0] if drivers else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
