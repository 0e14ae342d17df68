"""How a script ends on a UserError that it does not catch: one line per problem, with the script's line, and code 2.

Installed with the first import from `heavylift.api`, and by the launcher and `heavylift.compat` for their scripts.
Under the launcher the lines are its to say (`heavylift.launch.failures`). With HEAVYLIFT_DEBUG=1, in an interactive
session, and for every other exception Python's own way is kept.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.launch.entry import leave_script
from heavylift.launch.failures import RANK_0_SPEAKS_FIRST_S, await_first_rank, tell
from heavylift.launch.rank_output import LOG_VARIABLE

_PACKAGE = Path(__file__).parent.parent

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install() -> None:
    """Puts the hook in front of `sys.excepthook`, once."""
    if isinstance(sys.excepthook, _OneLine) or _OneLine.is_installed:
        return
    _OneLine.is_installed = True
    sys.excepthook = _OneLine(sys.excepthook)


class _OneLine:
    """An excepthook, with the one before it."""

    is_installed = False

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        debug = os.environ.get("HEAVYLIFT_DEBUG", "0") not in ("", "0")
        if not isinstance(error, UserError) or debug or sys.flags.interactive:
            self._before(kind, error, trace)
            return
        where = _line_of_script(trace)
        lines = [where + " ".join(problem.splitlines()) for problem in error.problems]
        if tell(EXIT_USER_ERROR, lines):
            if LOG_VARIABLE in os.environ:
                _print(lines)  # into this rank's own log file
            await_first_rank(RANK_0_SPEAKS_FIRST_S)
        else:
            if os.environ.get("RANK", "0") != "0":
                time.sleep(RANK_0_SPEAKS_FIRST_S)  # most often all ranks say the same; one that ends may end this one
            _print(lines)
        if "RANK" in os.environ:
            # while Python tears itself down the other ranks lose their connection, fail too, and may be gone before
            leave_script(EXIT_USER_ERROR)
        raise SystemExit(EXIT_USER_ERROR)


def _print(lines: list[str]) -> None:
    for line in lines:
        # past torch, which holds back what is written to sys.stderr in here until it is too late
        print(f"error: {line}", file=sys.__stderr__, flush=True)


def _line_of_script(trace: TracebackType | None) -> str:
    """`script.py:7: `, the last line outside of this package and of the means that run a script."""
    frames = [f for f in traceback.extract_tb(trace) if not Path(f.filename).is_relative_to(_PACKAGE)]
    frames = [f for f in frames if f.filename not in ("<frozen runpy>", "<frozen importlib._bootstrap>")]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
