"""Checkpoints of engines on CUDA devices: every state and weight comes back to the bit, from either tier.

Run with `pytest -m gpu`; with two devices or more on two ranks too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity_api.gpu_checkpoint import FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TESTS = Path(__file__).parent


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_states_come_back_to_the_bit(num_gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "parity_api.gpu_checkpoint", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    for rank in range(num_gpus):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {state_format: {"differed": True, "same": True} for state_format in FORMATS}
    assert sorted(p.name for p in (tmp_path / "fp32").iterdir()) == ["last", "latest"]
