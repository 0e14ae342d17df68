"""The model of one's own of examples/deepspeed, launched as its first lines say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from conftest import command_env, heavylift_command

FOLDER = Path(__file__).parent.parent / "examples" / "deepspeed" / "simple_model"


def launched(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """train.py on two processes."""
    command = [*heavylift_command(), "launch", "--num_gpus", "2", str(FOLDER / "train.py"), "--deepspeed"]
    command += ["--deepspeed_config", str(FOLDER / "ds_config.json"), *args]
    return subprocess.run(command, cwd=cwd, env=command_env(), capture_output=True, text=True, timeout=300)


def test_simple_model(tmp_path: Path) -> None:
    run = launched(tmp_path, "--steps", "60")
    assert run.returncode == 0, run.stderr
    losses = [float(value) for value in re.findall(r"^step \d+  loss (\S+)", run.stdout, re.MULTILINE)]
    assert len(losses) == 7 and losses[-1] < 0.2 * losses[0]
    assert "activation_checkpointing: " not in run.stderr, "its forward recomputes by itself"
    assert re.findall(r"loss scale (\S+)", run.stdout)[-1] == "65536"


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (["--steps", "0"], "argument --steps: expected a whole number from 1, got 0 (--help shows all)"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x' (--help shows all)"),
        (
            ["--seed", "99999999999999999999999"],
            "argument --seed: expected a whole number from 0 below 2^32",
        ),
        (["--deepspeed_config", "none.json"], "none.json: no such file"),
    ],
)
def test_what_is_wrong_is_told_once(tmp_path: Path, switches: list[str], said: str) -> None:
    run = launched(tmp_path, *switches)
    assert run.returncode == 2 and "Traceback" not in run.stderr and run.stdout == ""
    (line,) = [line for line in run.stderr.splitlines() if not line.startswith("note: ")]
    assert line.startswith(f"error: {said}")


def test_both_branches_are_taken() -> None:
    spec = importlib.util.spec_from_file_location("example_simple_model", FOLDER / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.make_dataset(0).tensors[0].float()
    means = rows.reshape(-1, 16, 4, module.WIDTH).mean(dim=(2, 3))  # steps of 16 micro-batches of 4 rows
    takes_rare = means > module.RARE_ABOVE
    assert takes_rare.any() and not takes_rare.all()
    # in some steps no rank and no micro-batch uses the rare expert
    assert (~takes_rare.any(dim=1)).any()
