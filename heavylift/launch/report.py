"""Which rank's failure explains the others, and the lines that say so."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from heavylift.errors import EXIT_USER_ERROR
from heavylift.launch.failures import Told
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
    observed: bool = False
    """Whether that time is the very moment, or else the second in which torch's agent looked."""
    told: Told | None = None
    """What the rank itself said of its failure."""


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
    """By the time of the failure. Ties by rank, but a SIGTERM last: most often it is the launcher's own."""
    return sorted(failures, key=lambda one: (one.seconds, one.exit_code == -signal.SIGTERM, one.rank))


def with_told(failures: Sequence[RankFailure], told: Mapping[int, Told]) -> list[RankFailure]:
    """The failures with what the ranks told, by local rank: their time, and their code where we ended them first."""
    found = []
    for failure in failures:
        note = told.get(failure.local_rank)
        if note is not None:
            ended_by_us = failure.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
            code = note.code if ended_by_us else failure.exit_code
            failure = replace(failure, exit_code=code, seconds=note.seconds, observed=True, told=note)
        found.append(failure)
    return found


def show_user_errors(told: Sequence[Told]) -> None:
    """Says each line of the ranks' user errors once, with the rank unless it is rank 0's as well."""
    lines: dict[str, int] = {}
    for note in sorted(told, key=lambda note: note.rank):
        for line in note.lines:
            lines.setdefault(line, note.rank)
    for line, rank in lines.items():
        print(f"error: {line}" if rank == 0 else f"error: rank {rank}: {line}", file=sys.stderr)


def _first(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that explains the others."""
    ordered = failures_in_order(failures)
    if ordered[0].exit_code == -signal.SIGTERM and all(failure.observed for failure in ordered):
        return ordered[0]  # the launcher ends nobody before one has failed: somebody else has sent it
    rank, code = first_cause([(failure.rank, failure.exit_code, failure.seconds) for failure in ordered])
    first = next(failure for failure in ordered if failure.rank == rank)
    earliest = ordered[0]
    if code == EXIT_USER_ERROR and first.told is not None and first.told.lines and earliest.told is not None:
        return earliest  # both told when: a user error may itself say no more than that another rank is gone
    return first


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
    first = _first(failures)
    rank, code = first.rank, first.exit_code
    if code == EXIT_USER_ERROR and first.told is not None and first.told.lines:
        return code  # said by `show_user_errors`
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
