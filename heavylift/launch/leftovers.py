"""What a rank started and left behind, ended with the run.

torch's agent signals the ranks that still run, and with each the processes of its group. What the rank that failed had
started (data workers, forks, programs) lives on, and may hold its GPU. Processes that made themselves a session of
their own are left alone, and so is everything after a run that succeeded. Linux; elsewhere nothing is found.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from heavylift.launch.entry import PARENT_VARIABLE

_GRACE_S = 3.0


def end_leftovers(folder: Path) -> None:
    """SIGTERM, then SIGKILL, to what is left of the sessions of this machine's ranks.

    `folder`: where ranks have left their process ids (`deaths.leave_pid`); each rank leads a session of that number.
    """
    sessions = {int(file.read_text(encoding="utf-8")) for file in folder.glob("pid.*")}
    left = [process for process in psutil.process_iter() if _is_left(process, sessions)]
    for process in left:
        _send(process, signal.SIGTERM)
    for process in psutil.wait_procs(left, timeout=_GRACE_S)[1]:
        _send(process, signal.SIGKILL)


def _is_left(process: psutil.Process, sessions: set[int]) -> bool:
    """The variable makes sure: the number of a rank that is gone may be another process's by now."""
    try:
        return (
            os.getsid(process.pid) in sessions
            and process.status() != psutil.STATUS_ZOMBIE
            and process.environ().get(PARENT_VARIABLE) == str(os.getpid())
        )
    except (OSError, psutil.Error):  # gone meanwhile, or somebody else's
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass
