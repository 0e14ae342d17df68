"""`heavylift launch [flags] script.py arguments`: a script of the user's on every GPU, with DeepSpeed's flags.

`heavylift --num_gpus 4 script.py` means the same: see `is_launch_line`.
"""

from __future__ import annotations

from collections.abc import Sequence

_OWN_FLAGS = ("-h", "--help", "--version", "--debug")


def run_launch(arguments: Sequence[str]) -> int:
    """Starts what the arguments say and waits for it. Returns the exit code; raises UserError for what cannot be."""
    from heavylift.launch.options import parse_options
    from heavylift.launch.start import start

    return start(parse_options(arguments))


def is_launch_line(arguments: Sequence[str]) -> bool:
    """Whether a line without a command is the launcher's: it begins with a flag that is not ours, or with a script."""
    if not arguments:
        return False
    first = arguments[0]
    return (first.startswith("-") and first.split("=")[0] not in _OWN_FLAGS) or first.endswith(".py")
