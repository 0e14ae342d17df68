"""Scripts with `import deepspeed` on CUDA devices: zero.Init, gathered parameters, `safe_*`, checkpoints, the launcher.

Run with `pytest -m gpu`; with two devices or more on two ranks. Sums on a GPU may differ from run to run, so these hold
what must be true of any order: it trains, and the states are where they should be.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import command_env, heavylift_command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPTS = Path(__file__).parent / "ds_scripts"


def launch(script: str, *arguments: str, cwd: Path) -> None:
    num_gpus = min(2, torch.cuda.device_count())
    command = [*heavylift_command(), "launch", "--as-deepspeed", "--num_gpus", str(num_gpus), str(SCRIPTS / script)]
    done = subprocess.run(
        [*command, *arguments], env=command_env(), cwd=cwd, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-8000:]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize(("stage", "dtype"), [("0", "fp32"), ("2", "bf16"), ("3", "fp16")])
def test_small_images(stage: str, dtype: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    launch(
        "small_images.py",
        "--deepspeed",
        "--stage",
        stage,
        "--dtype",
        dtype,
        "-e",
        "4",
        "--report",
        str(report),
        cwd=tmp_path,
    )
    found = read(report)
    assert found["losses"][-1] < 0.9 < found["losses"][0]
    assert found["accuracy"] > 0.6


@pytest.mark.parametrize("stage", ["2", "3"])
def test_masked_words(stage: str, tmp_path: Path) -> None:
    """States on the host; a run that goes on from its checkpoint stays close to the one that was not interrupted."""
    where = ("--checkpoint_dir", str(tmp_path), "--stage", stage)
    launch("masked_words.py", *where, "--report", "whole.json", cwd=tmp_path)
    launch(
        "masked_words.py",
        *where,
        *("--report", "resumed.json", "--load_checkpoint_dir", str(tmp_path), "--checkpoint_every", "0"),
        cwd=tmp_path,
    )
    whole, resumed = read(tmp_path / "whole.json"), read(tmp_path / "resumed.json")
    assert whole["losses"][-1] < whole["losses"][0] - 0.3
    assert whole["exp_avg"] == [64, 32] and whole["grad"] > 0
    assert resumed["losses"] == pytest.approx(whole["losses"][12:], abs=0.1)
    assert resumed["param"] == pytest.approx(whole["param"], rel=1e-2)
