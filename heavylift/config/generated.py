"""Pages in docs/ that a module generates: written, or checked that they are what the module would write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from heavylift.errors import EXIT_USER_ERROR


def write_or_check(arguments: Sequence[str], module: str, default_path: Path, render: Callable[[], str]) -> int:
    """`python -m MODULE [--check] [PATH]`: writes the page, or compares the file with it; returns the exit code.

    1: the file is out of date; 2: wrong arguments, or a path that cannot be written. Each is one line on stderr.
    """
    check = "--check" in arguments
    paths = [argument for argument in arguments if argument != "--check"]
    if len(paths) > 1 or any(path.startswith("-") for path in paths):
        print(f"usage: python -m {module} [--check] [PATH]", file=sys.stderr)
        return EXIT_USER_ERROR
    path = Path(paths[0]) if paths else default_path
    if check:
        if path.is_file() and path.read_text(encoding="utf-8") == render():
            return 0
        print(f"{path}: out of date; run python -m {module} {path}", file=sys.stderr)
        return 1
    try:
        path.write_text(render(), encoding="utf-8")
    except OSError as error:
        print(f"{path}: expected to be able to write, got {error.strerror}; change the path", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0
