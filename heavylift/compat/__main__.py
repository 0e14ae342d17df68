"""`python -m heavylift.compat [-m] script.py args`: runs a script, or a module, for which deepspeed is heavylift."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from heavylift.compat import install
from heavylift.errors import EXIT_USER_ERROR, UserError

USAGE = "usage: python -m heavylift.compat [-m] SCRIPT [ARGUMENTS...]"


def main(arguments: list[str]) -> int:
    """Runs it as `__main__`, with `sys.argv` and `sys.path` as Python itself would set them. Returns the exit code."""
    is_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if is_module else arguments
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if rest else EXIT_USER_ERROR
    try:
        install()
        if not is_module and not Path(rest[0]).is_file():
            raise UserError(f"{rest[0]}: no such file; give the path of a script, or -m and a module")
        sys.argv = rest
        if is_module:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(rest[0]).resolve().parent))
            runpy.run_path(rest[0], run_name="__main__")
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
