"""Runs functions of the tests on 1, 2 or 4 ranks. Processes are expensive to start, so they are kept for the session.

    results = run_on_ranks(4, job, case)      # job(case) on every rank inside one gloo group; one result per rank

`job` is a module-level function of a file in tests/; arguments and results are pickled. Left out: GPUs.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
# a rank that failed leaves its peers in a collective that never ends
_PEERS_S = 5.0


class RankError(AssertionError):
    """A job failed on at least one rank; the message holds their tracebacks."""


class _Pool:
    """`world_size` processes that wait for jobs."""

    def __init__(self, world_size: int, **more_env: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            ours, theirs = Pipe()
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
                "RANK_STORE": f"{self._folder.name}/store",
                "RANK_PIPE": str(theirs.fileno()),
                **more_env,
            }
            command = [sys.executable, "-m", "ranks.worker"]
            self._processes.append(subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]))
            theirs.close()
            self._connections.append(ours)

    def run(self, job: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        request = pickle.dumps((job, args))
        for connection in self._connections:
            connection.send_bytes(request)
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(replies) < len(self._connections) and time.monotonic() < deadline:
            waiting = [c for i, c in enumerate(self._connections) if i not in replies]
            for ready in wait(waiting, timeout=0.5):
                rank = self._connections.index(ready)  # type: ignore[arg-type]
                replies[rank] = self._receive(rank)
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + _PEERS_S)
        failed = [f"rank {rank}:\n{reply}" for rank, (good, reply) in sorted(replies.items()) if not good]
        missing = [rank for rank in range(len(self._connections)) if rank not in replies]
        if failed or missing:
            raise RankError("\n".join([*failed, f"no answer from ranks {missing}" if missing else ""]))
        return [replies[rank][1] for rank in range(len(self._connections))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            good, reply = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, f"the process ended with exit code {self._processes[rank].wait()}"
        return good, reply

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


_pools: dict[int, _Pool] = {}


def run_on_ranks(world_size: int, job: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
    """`job(*args)` on every rank; what each rank returned, in rank order. Raises RankError with the tracebacks."""
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    try:
        return _pools[world_size].run(job, args, timeout_s)
    except BaseException:
        # the ranks may be out of step with each other: the next job gets fresh ones
        _pools.pop(world_size).close()
        raise


def run_on_fresh_ranks(world_size: int, job: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
    """The same on processes that have run nothing else, for jobs that measure memory."""
    # by default glibc learns to keep large freed blocks; here every block from 1 MiB on is returned when it is freed
    pool = _Pool(world_size, MALLOC_MMAP_THRESHOLD_=str(2**20))
    try:
        return pool.run(job, args, timeout_s)
    finally:
        pool.close()


@atexit.register
def _close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()
