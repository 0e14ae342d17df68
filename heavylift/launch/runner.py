"""Starts the worker processes of one machine through torch's elastic launcher, and turns their end into an exit code.

Workers are separate Python processes with RANK, WORLD_SIZE, LOCAL_RANK and a rendezvous on localhost, as under
torchrun. When one dies the others are ended. Under torchrun itself (these variables set) nothing is started: see
`started_elsewhere` and `run_here`. Left out: several machines (use torchrun there), restarts.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from heavylift.errors import EXIT_USER_ERROR
from heavylift.launch.cores import threads_per_rank
from heavylift.launch.entry import PARENT_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

WORKER_MODULE = "heavylift.train.worker"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# how long workers may take to end on SIGTERM before SIGKILL
_SHUTDOWN_S = "10"


def started_elsewhere() -> bool:
    """Whether this process is already one rank of a run (torchrun or the like)."""
    return all(name in os.environ for name in RANK_VARIABLES)


def run_here(args: Sequence[str], module: str = WORKER_MODULE) -> int:
    """Runs the worker in this process, which is one rank of a run started elsewhere. Returns its exit code."""
    argv = sys.argv
    sys.argv = [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = argv
    return 0


def launch_workers(nproc: int, args: Sequence[str], module: str = WORKER_MODULE) -> int:
    """Runs `python -m MODULE ARGS...` in `nproc` processes and waits for all of them.

    Returns 0, or the exit code of the worker that failed first: its own, 128 + n if signal n ended it (named on
    stderr). A SIGTERM, SIGHUP or Ctrl-C to this process ends all workers and returns 128 + n too. Must be called
    from the main thread (signal handlers).
    """
    assert nproc >= 1, nproc
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _quiet_elastic()
    # a worker that has fewer threads than cores is slow, one that has more fights with its neighbours
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc)))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    command = ["-P", "-u", "-m", "heavylift.launch.entry", module, *args]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with tempfile.TemporaryDirectory(prefix="heavylift-launch-") as folder:
        try:
            elastic_launch(_launch_config(nproc, folder), sys.executable)(*command)
        except ChildFailedError as failed:
            return _report(failed.failures, nproc)
        except SignalException as ended:
            print(f"ended by {ended.sigval.name}; the workers are stopped", file=sys.stderr)
            return 128 + ended.sigval
        except KeyboardInterrupt:  # before torch set its handlers
            return 128 + signal.SIGINT
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


def _launch_config(nproc: int, log_folder: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"heavylift-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: any free one
        # the address given to workers; by default the host's name, which often does not resolve
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),  # else a folder in /tmp stays behind
    )
    # by default torch narrows each worker's cores to its GPU's memory node; the cores are divided once, by us
    config.numa_options = None
    return config


def _quiet_elastic() -> None:
    """The workers have said what is wrong; torch's log lines and failure box would bury it."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _report(failures: dict[int, ProcessFailure], nproc: int) -> int:
    """The exit code of the run; says which rank was killed or failed."""
    rank, code = first_cause([(rank, failure.exitcode, failure.timestamp) for rank, failure in failures.items()])
    if code < 0:
        name = signal.Signals(-code).name if -code in {int(s) for s in signal.Signals} else f"signal {-code}"
        hint = ": out of memory?" if -code == signal.SIGKILL else ""
        print(f"error: rank {rank} of {nproc} was killed ({name}){hint}", file=sys.stderr)
        return 128 - code
    if code != EXIT_USER_ERROR:
        print(f"error: rank {rank} of {nproc} failed with exit code {code}; its message is above", file=sys.stderr)
    return code


def first_cause(exits: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Of (rank, exit code, Unix seconds) in the order seen, the (rank, exit code) that explains the others.

    Negative codes are signals, as in `subprocess`. A killed rank makes its peers fail by a lost connection, and so
    does one that stops on a user error. SIGTERM, and a SIGKILL that comes later, are the launcher's own way of
    ending the peers.
    """
    start = min(seconds for _, _, seconds in exits)

    def order(one: tuple[int, int, int]) -> tuple[bool, bool, bool]:
        _, code, seconds = one
        ended_by_us = code == -signal.SIGTERM or (code == -signal.SIGKILL and seconds > start + int(_SHUTDOWN_S) // 2)
        return ended_by_us, code >= 0, code != EXIT_USER_ERROR

    rank, code, _ = min(exits, key=order)  # the first of equals
    return rank, code
