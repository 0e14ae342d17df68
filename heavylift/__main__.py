"""`python -m heavylift ...` is the command `heavylift ...`: for torchrun, and where the command is not on the path."""

from __future__ import annotations

from heavylift.cli.main import run

if __name__ == "__main__":
    run()
