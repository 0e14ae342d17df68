"""First code of every worker: `python -m heavylift.launch.entry [--local-rank] KIND TARGET ARGS...`.

KIND is `script` (as `python FILE`), `module` (as `python -m`, the working folder can be imported from), `worker` (a
module of ours, that folder left out) or `program` (anything executable, which replaces this process). `--local-rank`
puts `--local_rank=N` before ARGS, as scripts made for DeepSpeed expect.

Before that: asks the kernel to end this worker when the launcher dies, however that dies (kill -9 gives it no chance
to clean up, and orphans would hold the GPUs), sends the output where the launcher wants it, binds to cores. A Ctrl-C
that reaches a worker ends it without a traceback: until its code begins at once, then by KeyboardInterrupt.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import NoReturn

from heavylift.errors import UserError
from heavylift.launch.binding import bind_process, num_memory_nodes, place_of_rank
from heavylift.launch.failures import another_has_a_user_error, claim_folder, tell
from heavylift.launch.quota import BIND_VARIABLE, PLACES_VARIABLE
from heavylift.launch.rank_output import worker_redirect
from heavylift.launch.screen import keep_running_without_screen

PARENT_VARIABLE = "HEAVYLIFT_LAUNCHER_PID"
AS_DEEPSPEED_VARIABLE = "HEAVYLIFT_AS_DEEPSPEED"
"""1: `import deepspeed` finds heavylift."""
LOCAL_RANK_FLAG = "--local-rank"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CAUSE_ENDS_US_S = 3.0
_MAX_COMPILE_THREADS = 4


def die_with_launcher() -> None:
    """SIGKILL for this process as soon as the launcher is gone. Linux only; elsewhere nothing happens."""
    launcher = int(os.environ.get(PARENT_VARIABLE, "0"))
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the call above
        os._exit(1)


def let_ctrl_c_end() -> None:
    """A SIGINT ends this process from now on, one that came since its birth too: the launcher has it blocked till here.

    Python's own handler would show a traceback, and an import may swallow its KeyboardInterrupt.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def leave(code: int) -> NoReturn:
    """Ends the process without Python's own clean-up, which everything that matters must not depend on.

    A thread that comes back to Python while the interpreter ends is unwound, which C++ code on its stack answers by
    aborting the process ("terminate called without an active exception"): a finished run would be told as a failed one.
    """
    logging.shutdown()
    _flush()
    _exit(code)


def leave_script(code: int) -> NoReturn:
    """As `leave`, after what a script may rely on: its threads are waited for, `atexit` functions run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    _exit(code)


def _exit(code: int) -> NoReturn:
    """A negative code is a signal, as in `subprocess`: whoever waits for this process then sees that it was one."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the script, or nobody reads any more
            pass


def bind_if_told() -> None:
    """This rank's cores, and as many threads, where the launcher has divided them; before a library starts threads."""
    if PLACES_VARIABLE not in os.environ:
        return
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    place = place_of_rank(local_rank, local_world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(place.num_threads))
    # else torch.compile starts up to 32 processes for each rank, whose memory no plan has room for
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MAX_COMPILE_THREADS, place.num_threads)))
    if os.environ.get(BIND_VARIABLE) != "1":
        return
    for trouble in bind_process(place, num_memory_nodes()):
        if local_rank == 0:
            print(f"note: {trouble}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs what the arguments name and leaves with its exit code."""
    let_ctrl_c_end()
    die_with_launcher()
    worker_redirect()
    claim_folder()
    bind_if_told()
    arguments = sys.argv[1:]
    with_local_rank = arguments[0] == LOCAL_RANK_FLAG
    kind, target, *rest = arguments[with_local_rank:]
    if with_local_rank:
        rest.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    if kind == "program":
        _replace_process(target, rest)
    if os.environ.get(AS_DEEPSPEED_VARIABLE, "0") not in ("", "0"):
        from heavylift.compat import install

        install()
    if kind == "worker":
        keep_running_without_screen()
    else:
        from heavylift.api import script_errors

        script_errors.install()
    sys.argv = [target, *rest]
    if kind != "worker":  # our own asks for it when its libraries are there
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if kind in ("module", "worker"):
        if kind == "module":
            sys.path.insert(0, os.getcwd())
        # our own workers have nothing to wait for, and a rank that failed must end at once
        _run(lambda: runpy.run_module(target, run_name="__main__", alter_sys=True), leave if kind == "worker" else None)
    assert kind == "script", kind
    sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    _run(lambda: runpy.run_path(target, run_name="__main__"))


def _replace_process(program: str, arguments: list[str]) -> NoReturn:
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        print(f"error: {program}: cannot be run: {error.strerror}", file=sys.stderr)
        os._exit(126)


def _run(code: Callable[[], object], end_with: Callable[[int], NoReturn] | None = None) -> NoReturn:
    """Runs a script and leaves as Python would after it, or with `end_with`."""
    end_with = end_with or leave_script
    try:
        code()
    except KeyboardInterrupt:
        end_with(-signal.SIGINT)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = (end.code or 0) & 0xFF  # what the system makes of it: sys.exit(-1) is 255, and no signal
            if status:
                tell(status)
            end_with(status)
        print(end.code, file=sys.stderr)
        tell(1)
        end_with(1)
    except BaseException as error:
        tell(1)
        error.__traceback__ = _scripts_own(error.__traceback__)
        end_with(_show(error))
    end_with(0)


def _show(error: BaseException) -> int:
    """Shows an exception as Python would, by the hook in place, and returns the exit code."""
    if not isinstance(error, UserError) and another_has_a_user_error():
        time.sleep(_CAUSE_ENDS_US_S)  # the launcher ends this rank meanwhile, and what is shown is the cause
    if isinstance(error, ImportError) and (hint := _deepspeed_hint(error)) is not None:
        error.add_note(hint)
    try:
        # the hook may be the script's own (loggers mark a run as crashed with it)
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return end.code & 0xFF if isinstance(end.code, int) else 1
    return 1


def _deepspeed_hint(error: ImportError) -> str | None:
    """What to do about a DeepSpeed that is not installed, None where that is not what is missing."""
    if "deepspeed" not in str(error).lower() or "deepspeed" in sys.modules or find_spec("deepspeed") is not None:
        return None
    return "with `heavylift launch --as-deepspeed` (before the script) `import deepspeed` finds heavylift"


def _scripts_own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy above the script's first."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
