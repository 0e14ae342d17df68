"""The pool of test ranks: a rank ended by a signal gets one more try on fresh processes, and only one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks.pool import RankError, run_on_ranks


def crash_once(flag: str) -> int:
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return 7


def crash_always() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_one_crash_is_told_and_tried_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="done again"):
        assert run_on_ranks(1, crash_once, str(tmp_path / "flag")) == [7]


def test_a_job_that_crashes_by_itself_fails() -> None:
    with pytest.warns(UserWarning, match="done again"), pytest.raises(RankError, match="exit code -11"):
        run_on_ranks(1, crash_always)
