"""`engine.offload_states` on CUDA devices: the device's memory is really free meanwhile, and no bit changes.

Run with `pytest -m gpu`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks.gpus import run_on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHARES = {"device": 1.0, "half on the host": 0.5}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_there_and_back(num_ranks: int, tmp_path: Path) -> None:
    run_on_gpus(num_ranks, "parity_api.gpu_offload_states", tmp_path)
    for rank in range(num_ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name, share in SHARES.items():
            row = found[name]
            assert row["same"], (name, rank)
            # masters and two moments, in float32
            expected = 12 * share * row["numel"]
            assert all(abs(told - expected) < 0.02 * expected for told in row["told"]), row
            assert all(abs(freed - expected) < 0.02 * expected for freed in row["freed"]), row
