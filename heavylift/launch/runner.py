"""Starts the worker processes of one machine through torch's elastic launcher, and turns their end into an exit code.

Workers are separate Python processes with RANK, WORLD_SIZE, LOCAL_RANK and a rendezvous, as under torchrun. When one
dies the others are ended. `heavylift train` uses `launch_workers`, `heavylift launch` `run_node`. Under torchrun
itself (these variables set) nothing is started: see `started_elsewhere` and `run_here`. Left out: restarts, and
starting the other machines (`multinode.py`).
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from heavylift.errors import UserError
from heavylift.launch.binding import binding_environment, machine_places
from heavylift.launch.deaths import DeathWatch
from heavylift.launch.devices import gpu_pci_ids
from heavylift.launch.entry import PARENT_VARIABLE
from heavylift.launch.failures import FAILURES_VARIABLE, Told, read_told
from heavylift.launch.leftovers import end_leftovers
from heavylift.launch.node_errors import hand_up
from heavylift.launch.oom import read_oom_count
from heavylift.launch.rank_output import LOG_VARIABLE, PIPES_VARIABLE, RankStderr, end_of_file, last_lines, log_file
from heavylift.launch.report import SHUTDOWN_S, RankFailure, first_cause, report, show_user_errors, with_told
from heavylift.launch.resctrl import partitions_from_environment

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["NodeRun", "ending_signals", "first_cause", "launch_workers", "run_here", "run_node", "started_elsewhere"]

WORKER_MODULE = "heavylift.train.worker"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TAIL_LINES = 15


@dataclass(frozen=True)
class NodeRun:
    """What this machine has to start."""

    num_ranks: int
    """Workers on this machine."""
    entry: tuple[str, ...]
    """Arguments of `heavylift.launch.entry`."""
    node_rank: int = 0
    num_nodes: int = 1
    world_size: int | None = None
    """Ranks of all machines, None where only this machine's are known."""
    master_addr: str | None = None
    """Of node 0; None: this is the only machine."""
    master_port: int | None = None
    """None: any free one."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the workers, beside those of the launcher."""
    show_tail: bool = True
    """Whether the end of the failed rank's stderr is shown."""
    is_part: bool = False
    """Whether another launcher has started this one: it tells of signals that end the run, and of user errors."""


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

    Where the GPUs' places are known, each process is bound to the cores beside its GPU. Returns 0, or the exit code of
    the worker that failed first: its own, 128 + n if signal n ended it (named on stderr). A SIGTERM, SIGHUP or Ctrl-C
    to this process ends all workers and returns 128 + n too. Must be called from the main thread (signal handlers).
    """
    assert nproc >= 1, nproc
    gpus = gpu_pci_ids()
    places = machine_places(nproc, pci_ids=gpus)
    environment = binding_environment(places, bind=len(gpus) >= nproc)
    run = NodeRun(nproc, ("worker", module, *args), environment=environment, show_tail=False)
    with partitions_from_environment():
        return run_node(run)


def run_node(run: NodeRun, root: Path = Path("/")) -> int:
    """Starts this machine's workers and waits for them. Returns the exit code as `launch_workers` does.

    `root`: where /proc and /sys are found (counters of kills for memory). Raises UserError when the rendezvous with
    the other machines fails.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _quiet_elastic()
    command = ["-P", "-u", "-m", "heavylift.launch.entry", *run.entry]
    before = read_oom_count(root)
    with tempfile.TemporaryDirectory(prefix="heavylift-launch-") as folder, _signals_restored():
        # a rank's log file holds all that it says
        stderr = _pipes(folder, run.num_ranks) if run.show_tail and LOG_VARIABLE not in run.environment else None
        variables = {
            **run.environment,
            PARENT_VARIABLE: str(os.getpid()),
            FAILURES_VARIABLE: folder,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S)),
            **({PIPES_VARIABLE: folder} if stderr is not None else {}),
        }
        try:
            with (
                _environment(variables),
                stderr or nullcontext(),
                DeathWatch(Path(folder), run.num_ranks) as deaths,
                _ctrl_c_waits_in_ranks(),
            ):
                elastic_launch(_launch_config(run, folder), sys.executable)(*command)
        except ChildFailedError as failed:
            end_leftovers(Path(folder))
            told = read_told(Path(folder))
            _say_user_errors(run, list(told.values()))
            failures = with_told(_failures(failed.failures, deaths.seconds), told)
            world_size = run.world_size or run.num_ranks
            oom = (before, read_oom_count(root))
            if stderr is None and LOG_VARIABLE not in run.environment:
                return report(failures, world_size, oom, None)
            return report(failures, world_size, oom, lambda failure: _tail(run, stderr, failure), stderr is not None)
        except SignalException as ended:
            end_leftovers(Path(folder))
            _say_user_errors(run, list(read_told(Path(folder)).values()))
            if not run.is_part:
                print(f"ended by {ended.sigval.name}; the workers are stopped", file=sys.stderr)
            return 128 + ended.sigval
        except (DistNetworkError, DistStoreError) as error:
            reason = " ".join(str(error).split())[:200]
            if run.master_port is None:
                raise UserError(f"the ranks cannot be started on this machine: {reason}") from None
            where = f"{run.master_addr}:{run.master_port}"
            raise UserError(
                f"node {run.node_rank} of {run.num_nodes}: no rendezvous at {where}: {reason}; check --master_addr and "
                "--master_port, and that every node was started"
            ) from None
        except KeyboardInterrupt:  # before torch set its handlers
            return 128 + signal.SIGINT
    return 0


def _say_user_errors(run: NodeRun, told: Sequence[Told]) -> None:
    if run.is_part:
        hand_up(told)
    else:
        show_user_errors(told)


def _pipes(folder: str, num_ranks: int) -> RankStderr | None:
    """None on a file system for temporary files that has no pipes; the ranks' messages then only pass by."""
    try:
        return RankStderr(folder, num_ranks)
    except OSError:
        return None


def _tail(run: NodeRun, stderr: RankStderr | None, failure: RankFailure) -> list[str]:
    if stderr is not None:
        return last_lines(stderr.end(failure.local_rank), _TAIL_LINES)
    return last_lines(end_of_file(log_file(run.environment[LOG_VARIABLE], failure.rank)), _TAIL_LINES)


def _failures(failures: dict[int, ProcessFailure], deaths: dict[int, float]) -> list[RankFailure]:
    found = []
    for rank, failure in failures.items():
        ended = deaths.get(failure.local_rank)
        seconds = float(failure.timestamp) if ended is None else ended
        found.append(RankFailure(rank, failure.local_rank, failure.exitcode, seconds, ended is not None))
    return found


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, which workers inherit, and puts the old ones back."""
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def ending_signals() -> list[signal.Signals]:
    """Signals that end a run: all that ask for it, but for a SIGHUP that this process was told to ignore."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP]), signal.SIGQUIT]


@contextmanager
def _ctrl_c_waits_in_ranks() -> Iterator[None]:
    """Ranks are born with SIGINT blocked, until their first code (`entry.py`) asks for it: Python itself would answer
    with a traceback, or forget it. Here the threads that are there already take it; Python runs the handler all the
    same in this one, the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Puts back the signal handlers that torch's agent replaces."""
    handlers = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _launch_config(run: NodeRun, log_folder: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    alone = run.num_nodes == 1 and run.master_port is None
    config = LaunchConfig(
        min_nodes=run.num_nodes,
        max_nodes=run.num_nodes,
        nproc_per_node=run.num_ranks,
        # the same on every node: the nodes meet under this name
        run_id=f"heavylift-{os.getpid()}" if alone else "heavylift",
        rdzv_backend="c10d" if alone else "static",
        # port 0: any free one
        rdzv_endpoint="127.0.0.1:0" if alone else f"{run.master_addr or '127.0.0.1'}:{run.master_port}",
        rdzv_configs={} if alone else {"rank": run.node_rank},
        # the address given to workers; by default the host's name, which often does not resolve
        local_addr="127.0.0.1" if alone else None,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),  # else a folder in /tmp stays behind
    )
    # by default torch narrows each worker's cores to its GPU's memory node; the cores are divided once, by us
    config.numa_options = None
    # nohup asks for SIGHUP to be ignored
    config.signals_to_handle = ",".join(number.name for number in ending_signals())
    return config


def _quiet_elastic() -> None:
    """The workers have said what is wrong; torch's log lines and failure box would bury it."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
