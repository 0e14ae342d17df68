"""First code of every worker process: `python -m heavylift.launch.entry MODULE ARGS...` runs MODULE as `-m` would.

Asks the kernel to end this worker when the launcher dies, however that dies (kill -9 gives it no chance to clean up,
and orphans would hold the GPUs). A Ctrl-C that reaches a worker ends it without a traceback.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import sys
from typing import NoReturn

PARENT_VARIABLE = "HEAVYLIFT_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher() -> None:
    """SIGKILL for this process as soon as the launcher is gone. Linux only; elsewhere nothing happens."""
    launcher = int(os.environ.get(PARENT_VARIABLE, "0"))
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the call above
        os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends the process without Python's own clean-up, which everything that matters must not depend on.

    While the interpreter ends, a thread of gloo that lets go of its last Python object aborts the process ("terminate
    called without an active exception", about one run in twenty): a finished run would be told as a failed one.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the module named by the first argument with the rest as its arguments."""
    die_with_launcher()
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            leave(end.code or 0)
        raise
    leave(0)


if __name__ == "__main__":
    main()
