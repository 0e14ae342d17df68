"""A module of the tests under torchrun, one process per CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent


def run_on_gpus(num_gpus: int, module: str, *args: object) -> None:
    """`python -m module args` on every rank, which must end well. Skips the test where there are fewer devices."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, "-m", module, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-8000:]
