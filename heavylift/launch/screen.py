"""stdout and stderr of our own programs that never end a run: the metrics are in files, the screen is worth less.

A reader that has gone (`| head -1`, a closed ssh), a log on a full disk, a descriptor that is closed, a locale without
the characters: what cannot be written is left out. Scripts of the user's keep Python's own streams.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _Lossy(io.FileIO):
    """Writes all or gives up, and says that it has written all."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while len(rest):
                rest = rest[super().write(rest) or 0 :]
        except OSError:
            pass
        return size


def open_missing() -> None:
    """Descriptors 0 to 2 that are closed become /dev/null: the next file opened would take their place, and get what
    libraries print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def keep_running_without_screen() -> None:
    """Puts such streams in the place of `sys.stdout` and `sys.stderr`."""
    open_missing()
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def _stream(descriptor: int, old: TextIO | None) -> TextIO:
    encoding = old.encoding if old is not None else "utf-8"
    raw = _Lossy(descriptor, "w", closefd=False)
    # a line is one write, so that those of several ranks do not mix; print writes the line's end by itself
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)
