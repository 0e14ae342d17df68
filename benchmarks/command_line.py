"""How the benchmarks take their arguments and end: what whoever called them can mend is one line, exit code 2.

Under a launcher only one process of a machine speaks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.files import replacing


class Parser(argparse.ArgumentParser):
    """Arguments by their whole names; an error is a `UserError`. `description`: the script's docstring."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message} (--help shows all)")


def whole_number(text: str) -> int:
    """An argument that counts something. Raises ArgumentTypeError for what is none, from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


def seconds(text: str) -> float:
    """An argument that is a time. Raises ArgumentTypeError for what is none, above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return number


def result_file(text: str) -> Path:
    """An argument that names a file to write. Raises ArgumentTypeError where it cannot be one: before the work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {path}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.absolute().parent} is no folder")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def write_result(path: Path, text: str) -> None:
    """Writes a result whole or, with UserError, not at all: an older file stays then."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe, whose place no file must take
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; change --out") from None


def run(main: Callable[[], int]) -> NoReturn:
    """Leaves the process with what `main` returns, or 2 where it raised UserError."""
    try:
        code = main()
    except UserError as error:
        code = EXIT_USER_ERROR
        for problem in error.problems if os.environ.get("LOCAL_RANK", "0") == "0" else ():
            print(f"error: {problem}", file=sys.stderr, flush=True)
    sys.exit(code)
