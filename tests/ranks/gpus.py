"""A module of the tests on several ranks with CUDA devices."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
import torch

TESTS = Path(__file__).parent.parent
TIMEOUT_S = 540.0


def run_on_gpus(num_ranks: int, module: str, *args: object) -> None:
    """`python -m module args` on every rank, which must end well: one process per device.

    Where there are fewer devices the ranks share the first, each as if it were a machine of its own. That is right for
    what is computed and in which order, and says nothing about speed.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", module, *map(str, args)]
    if torch.cuda.device_count() >= num_ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        _wait_for_all([command[:1] + launcher + command[1:]], [env])
    else:
        _wait_for_all([command] * num_ranks, [{**env, **more} for more in as_machines(num_ranks)])


def as_machines(num_ranks: int) -> list[dict[str, str]]:
    """Variables of ranks that are each alone on what NCCL takes for a machine, so that it lets them share a device.

    NCCL refuses two ranks of one machine on one device; it knows a machine by NCCL_HOSTID where that is set. Data
    then passes through sockets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    return [{**shared, "RANK": str(rank), "NCCL_HOSTID": f"machine{rank}"} for rank in range(num_ranks)]


def _wait_for_all(commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]]) -> None:
    """Runs the commands side by side; once one fails, or time is up, the others are ended."""
    with tempfile.TemporaryDirectory() as folder:
        logs: list[IO[str]] = [(Path(folder) / f"{i}.log").open("w+") for i in range(len(commands))]
        running = [
            subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            for command, env, log in zip(commands, envs, logs, strict=True)
        ]
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                if any(process.returncode for process in running):
                    break
                time.sleep(0.05)
        finally:
            codes = [process.poll() for process in running]
            for process in running:
                process.kill()
                process.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read()[-8000:])
            log.close()
    first_bad = next((i for i, code in enumerate(codes) if code), codes.index(None) if None in codes else None)
    assert first_bad is None, f"rank {first_bad}: {codes}\n{texts[first_bad]}"
