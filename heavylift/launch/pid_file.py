"""The launcher's process id in a file while it runs, for programs that start it and want to end it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heavylift.errors import UserError


def pid_file(pid: int) -> Path:
    """Where the id of launcher `pid` is noted: the name that DeepSpeed uses, in the folder for temporary files."""
    return Path(tempfile.gettempdir()) / f"{pid}.deepspeed"


@contextmanager
def saved_pid(wanted: bool) -> Iterator[None]:
    """The file is there while the context lasts, if `wanted`. Raises UserError when it cannot be written."""
    if not wanted:
        yield
        return
    path = pid_file(os.getpid())
    try:
        path.write_text(str(os.getpid()), encoding="ascii")  # of an earlier process of this number, if it is there
    except OSError as error:
        raise UserError(f"--save_pid: {path} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
