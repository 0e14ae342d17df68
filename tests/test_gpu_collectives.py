"""What is told of waiting for collectives, where one of two ranks is late on purpose. Run with `pytest -m gpu`."""

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


def test_who_is_on_time_waits_for_who_is_late(tmp_path: Path) -> None:
    """The sleep is far longer than all else in these steps."""
    from ranks.gpu_schedules import save_config

    run_on_gpus(2, "ranks.gpu_collectives", save_config(tmp_path), tmp_path / "result.json")
    on_time, late = json.loads((tmp_path / "result.json").read_text())
    asleep_s = late["sleep_s"]
    for waited, slept in zip(on_time["steps"], late["steps"], strict=True):
        expected_s = asleep_s if waited["late"] else 0.0
        assert abs(waited["waited_s"] - expected_s) < 0.4 * asleep_s, (waited, asleep_s)
        assert slept["waited_s"] < 0.4 * asleep_s, (slept, asleep_s)
