"""Which rank's failure explains the others, and the lines that say so."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from heavylift.errors import EXIT_USER_ERROR
from heavylift.launch.oom import OomCount, explain_kill

SHUTDOWN_S = 10
"""How long workers may take to end on SIGTERM before SIGKILL, in seconds."""
_SHOWN_LINES = 15


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not end with 0."""

    rank: int
    local_rank: int
    exit_code: int
    """Negative: the signal that ended it, as in `subprocess`."""
    seconds: float
    """When, since 1970: when it raised if it told, else when its end was seen."""


def first_cause(exits: Sequence[tuple[int, int, float]]) -> tuple[int, int]:
    """Of (rank, exit code, seconds since 1970) in the order seen, the (rank, exit code) that explains the others.

    Negative codes are signals, as in `subprocess`. A killed rank makes its peers fail by a lost connection, and so
    does one that stops on a user error. SIGTERM, and a SIGKILL that comes later, are the launcher's own way of
    ending the peers.
    """
    start = min(seconds for _, _, seconds in exits)

    def order(one: tuple[int, int, float]) -> tuple[bool, bool, bool]:
        _, code, seconds = one
        ended_by_us = code == -signal.SIGTERM or (code == -signal.SIGKILL and seconds > start + SHUTDOWN_S // 2)
        return ended_by_us, code >= 0, code != EXIT_USER_ERROR

    rank, code, _ = min(exits, key=order)  # the first of equals
    return rank, code


def failures_in_order(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """By the time of the failure, ties by rank."""
    return sorted(failures, key=lambda failure: (failure.seconds, failure.rank))


def with_told_times(failures: Sequence[RankFailure], folder: Path) -> list[RankFailure]:
    """The failures with the time that the ranks themselves noted in `folder` (`entry.FAILURES_VARIABLE`)."""
    told = []
    for failure in failures:
        try:
            seconds = int((folder / f"failed.{failure.local_rank}").read_text()) / 1e9
        except (OSError, ValueError):
            seconds = failure.seconds
        told.append(RankFailure(failure.rank, failure.local_rank, failure.exit_code, seconds))
    return told


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    return signal.Signals(number).name if number in {int(one) for one in signal.Signals} else f"signal {number}"


def report(
    failures: Sequence[RankFailure],
    world_size: int,
    oom: tuple[OomCount, OomCount],
    tail: Callable[[RankFailure], list[str]] | None,
    on_screen: bool = False,
) -> int:
    """Names the rank that failed first on stderr and returns the exit code of the run.

    Its own code, or 128 + n if signal n ended it. `oom`: counters before and after. `tail`: the last lines of a rank,
    None where they are on the screen just above; a user error (code 2) then needs no further word. Nor does it where
    the lines have passed over the screen (`on_screen`) and the last of them is such an error's own.
    """
    ordered = failures_in_order(failures)
    rank, code = first_cause([(failure.rank, failure.exit_code, failure.seconds) for failure in ordered])
    first = next(failure for failure in ordered if failure.rank == rank)
    lines = tail(first)[-_SHOWN_LINES:] if tail is not None else []
    if code == EXIT_USER_ERROR and on_screen and lines and lines[-1].startswith("error: "):
        return code
    where = "; its last lines:" if lines else ("" if tail is not None else "; its message is above")
    if code < 0:
        hint = explain_kill(*oom) if code == -signal.SIGKILL else ""
        where = "; its last lines:" if lines else ""
        print(f"error: rank {rank} of {world_size} was killed ({signal_name(-code)}){hint}{where}", file=sys.stderr)
    elif code != EXIT_USER_ERROR or tail is not None:
        print(f"error: rank {rank} of {world_size} failed with exit code {code}{where}", file=sys.stderr)
    for line in lines:
        print(f"  | {line}", file=sys.stderr)
    return 128 - code if code < 0 else code
