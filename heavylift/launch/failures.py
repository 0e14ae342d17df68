"""What a rank that fails tells its launcher: when, with which exit code, and the lines of a user error.

Which failure came first shows in no exit code, and an error that every rank makes is to be said once: so the lines of a
user error go into a folder of the launcher's, which says each of them once, instead of on the screen. Only the rank's
own process tells: what the script starts is not a rank. Without a launcher nobody is told.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heavylift.launch.deaths import leave_pid

FAILURES_VARIABLE = "HEAVYLIFT_FAILURES"
"""Folder for `failed.LOCAL_RANK`, a file of JSON."""
RANK_0_SPEAKS_FIRST_S = 3.0
"""How long other ranks wait before they say a user error, which most often is the same on all."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Told:
    """What one rank has told."""

    rank: int
    """Among all ranks."""
    seconds: float
    """When it failed, since 1970."""
    code: int
    """The exit code that it was about to leave with."""
    lines: tuple[str, ...] = ()
    """Of a user error, one per problem, without the word `error`."""


@dataclass
class _Claim:
    """The folder, and the process that may write there."""

    folder: Path | None = None
    process: int = 0

    def mine(self) -> Path | None:
        return self.folder if self.process == os.getpid() and self.folder is not None and self.folder.is_dir() else None


_claim = _Claim()


def claim_folder() -> None:
    """Makes this process the one that tells for its rank; processes that it starts find no folder."""
    folder = os.environ.pop(FAILURES_VARIABLE, None)
    _claim.folder = None if folder is None else Path(folder)
    _claim.process = os.getpid()
    if _claim.folder is not None:
        leave_pid(_claim.folder, int(os.environ["LOCAL_RANK"]))


def tell(code: int, lines: Sequence[str] = ()) -> bool:
    """Tells the launcher that this rank fails now. Returns whether there is one; it will show the lines."""
    folder = _claim.mine()
    if folder is None:
        return False
    note = {"rank": int(os.environ["RANK"]), "seconds": time.time(), "code": code, "lines": list(lines)}
    name = f"failed.{os.environ['LOCAL_RANK']}"
    try:
        (folder / f".{name}").write_text(json.dumps(note), encoding="utf-8")
        (folder / f".{name}").rename(folder / name)  # whole or not at all: the launcher may end this rank any time
    except OSError:
        return False
    return True


def read_told(folder: Path) -> dict[int, Told]:
    """Local rank -> what it told, in the order of the local ranks."""
    found = {}
    for file in folder.glob("failed.*"):
        note = json.loads(file.read_text(encoding="utf-8"))
        found[int(file.suffix[1:])] = Told(note["rank"], note["seconds"], note["code"], tuple(note["lines"]))
    return dict(sorted(found.items()))


def await_first_rank(seconds: float) -> None:
    """Waits until local rank 0 has told of a failure too, at most so long; the launcher may end this rank meanwhile.

    Most often all ranks make the same error, and one that left at once would keep rank 0 from saying so.
    """
    folder, end = _claim.mine(), time.monotonic() + seconds
    while folder is not None and not (folder / "failed.0").exists() and time.monotonic() < end:
        time.sleep(_POLL_S)


def another_has_a_user_error() -> bool:
    """Whether another rank of this machine has told of a user error: what fails here then has only lost that rank."""
    folder = _claim.mine()
    if folder is None:
        return False
    own = int(os.environ["LOCAL_RANK"])
    return any(told.lines for local_rank, told in read_told(folder).items() if local_rank != own)
