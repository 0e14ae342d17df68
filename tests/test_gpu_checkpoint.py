"""Checkpoints of engines on CUDA devices: every state and weight comes back to the bit, from either tier.

Run with `pytest -m gpu`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parity_api.gpu_checkpoint import FORMATS
from ranks.gpus import run_on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_states_come_back_to_the_bit(num_gpus: int, tmp_path: Path) -> None:
    run_on_gpus(num_gpus, "parity_api.gpu_checkpoint", tmp_path)
    for rank in range(num_gpus):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {state_format: {"differed": True, "same": True} for state_format in FORMATS}
    assert sorted(p.name for p in (tmp_path / "fp32").iterdir()) == ["last", "latest"]
