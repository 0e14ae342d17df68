"""The scripts of benchmarks/ as somebody without a launcher or with a slip in the command meets them."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import command_env

from heavylift.errors import UserError

FOLDER = Path(__file__).parents[1] / "benchmarks"
Recipe = Callable[..., Path]


def run_script(name: str, *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/, started by this Python alone."""
    command = [sys.executable, str(FOLDER / name), *map(str, args)]
    env = command_env(CUDA_VISIBLE_DEVICES="", XDG_CACHE_HOME=str(cwd / "cache"))
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def random_recipe(write_recipe: Recipe) -> Path:
    data = {"format": "random", "cutoff_len": 16, "num_samples": 4, "dataset": None}
    return write_recipe(data=data, model={"init": "random", "dtype": "bfloat16"}, engine={"offload_optimizer": "host"})


def test_step_variants_on_one_process(tmp_path: Path, random_recipe: Path) -> None:
    variants = ["device", "0.5:split:deferred", "0:fp32:immediate"]
    args = ["--variants", ",".join(variants), "--steps", 2, "--warmup", 1, "--out", "found.json", "engine.ratio=0.5"]
    done = run_script("step_variants.py", random_recipe, *map(str, args), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_processes"] == 1 and found["ratio"] == 0.5
    assert [line.split()[0] for line in done.stdout.splitlines() if " s, device " in line] == variants
    assert list(found["variants"]) == variants
    assert all(len(one["steps"]) == 2 and one["step_s"] > 0 for one in found["variants"].values())
    schedules = [one["steps"][0]["schedule"] for one in found["variants"].values()]
    assert schedules == ["synchronous", "deferred", "immediate"]


def test_step_variants_tells_of_a_recipe_in_one_line(tmp_path: Path, random_recipe: Path) -> None:
    args = ["--variants", "0:split:auto", "--out", "found.json"]
    for more, said in (
        ("engine.foo=1", "error: command line: engine.foo: unknown key; known: zero_stage"),
        ("model.dtype=float32", "error: --variants: 0:split:auto: state format split needs bfloat16 parameters"),
    ):
        done = run_script("step_variants.py", random_recipe, *args, more, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        (line,) = [line for line in done.stderr.splitlines() if "Warning" not in line and not line.startswith("  ")]
        assert line.startswith(said)
    assert not (tmp_path / "found.json").exists()


SPIED = """
import sys
sys.path.insert(0, {folder!r})
from heavylift.engine import Engine
import step_variants
train_step = Engine.train_step
def spy(self, batches, num_trained_tokens):
    print("step of", [tuple(batch.labels.shape) for batch in batches], num_trained_tokens, flush=True)
    distinct = {{batch.input_ids.numpy().tobytes() for batch in batches}}
    assert len(distinct) == len(batches)
    return train_step(self, batches, num_trained_tokens)
Engine.train_step = spy
step_variants.main()
"""


def test_step_variants_accumulates_as_the_recipe_says(tmp_path: Path, random_recipe: Path) -> None:
    args = ["--variants", "0:fp32:deferred", "--steps", "2", "--warmup", "0", "--out", "found.json"]
    args += ["train.gradient_accumulation_steps=3", "train.per_device_train_batch_size=2", "data.num_samples=6"]
    done = subprocess.run(
        [sys.executable, "-c", SPIED.format(folder=str(FOLDER)), str(random_recipe), *args],
        cwd=tmp_path,
        env=command_env(CUDA_VISIBLE_DEVICES="", XDG_CACHE_HOME=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("step of")]
    assert steps == [f"step of {[(2, 16)] * 3} 96"] * 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["micro_batches"], found["tokens_per_step"]) == (3, 96)


GOOD = {
    "step_variants": ["r.yaml", "--variants", "device", "--out", "o.json"],
    "cpu_adamw": ["--params", "100", "--repeats", "1"],
    "compare_deepspeed": ["--nproc", "2", "--out", "o.json"],
    "loss_curves": ["--out", "o.json"],
}


@pytest.mark.parametrize(
    ("script", "more", "said"),
    [
        ("step_variants", ["--out", "nowhere/o.json"], "argument --out: {cwd}/nowhere is no folder"),
        ("step_variants", ["--out", "."], "argument --out: expected a file, got the folder ."),
        ("step_variants", ["--steps", "two"], "argument --steps: expected a whole number from 1, got 'two'"),
        ("step_variants", ["--steps", "3"], "argument --warmup: expected a number from 0 below --steps 3, got 3"),
        ("step_variants", ["--variants", "0:fp32"], "argument --variants: expected device or SHARE:FORMAT:SCHEDULE"),
        ("step_variants", ["--variants", "2:fp32:auto"], "argument --variants: expected device or SHARE:FORMAT:SCHED"),
        (
            "step_variants",
            ["--variants", "device,0:fp32:auto,device"],
            "argument --variants: 'device' is 'device' again",
        ),
        ("step_variants", ["--variants", "0:fp32:auto,0.0:fp32:auto"], "argument --variants: '0.0:fp32:auto' is '0:fp"),
        ("step_variants", ["--variant", "device"], "unrecognized arguments: --variant"),
        ("cpu_adamw", ["--params", "0"], "argument --params: expected a whole number from 1, got '0'"),
        ("cpu_adamw", ["--threads", "1,x"], "argument --threads: expected a whole number from 1, got 'x'"),
        ("cpu_adamw", ["--threads", "1,100000"], "argument --threads: expected at most 1024 threads, got 100000"),
        ("cpu_adamw", ["--out", "."], "argument --out: expected a file, got the folder ."),
        ("compare_deepspeed", ["--cases", "fast"], "--cases: no case fast; choose of"),
        ("compare_deepspeed", ["--nproc", "x"], "argument --nproc: expected a whole number from 1, got 'x'"),
        ("compare_deepspeed", ["--seq", "0"], "argument --seq: expected a whole number from 1, got '0'"),
        ("compare_deepspeed", ["--timeout", "-1"], "argument --timeout: expected seconds above 0, got '-1'"),
        (
            "compare_deepspeed",
            ["--warmup", "12"],
            "argument --warmup: expected a number from 0 below --steps 12, got 12",
        ),
        ("loss_curves", ["--steps", "0"], "argument --steps: expected a whole number from 1, got '0'"),
        (
            "loss_curves",
            ["--dtype", "float8"],
            "argument --dtype: expected one or both of float32, bfloat16, got 'float8'",
        ),
        ("loss_curves", ["--max-grad-norm", "nan"], "argument --max-grad-norm: expected a number above 0, got nan"),
        ("loss_curves", ["--out", "nowhere/o.json"], "argument --out: {cwd}/nowhere is no folder"),
    ],
)
def test_bad_arguments(
    script: str, more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    module: Any = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *GOOD[script]])
    module.arguments()
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *GOOD[script], *more])
    with pytest.raises(UserError) as caught:
        module.arguments()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{script}.py: " + said.format(cwd=tmp_path)) and "\n" not in problem


def test_cpu_adamw_does_not_begin_what_does_not_fit(tmp_path: Path) -> None:
    done = run_script("cpu_adamw.py", "--params", "9" * 14, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --params {'9' * 14}: 3352761.3 GiB are needed, ") and line.endswith("; lower it")


def test_cpu_adamw_tells_in_one_line_of_threads_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module: Any = importlib.import_module("cpu_adamw")
    kernel = module.native.load()
    if kernel is None:
        pytest.skip("the native kernel is not built")
    with pytest.raises(UserError) as caught:
        module._measure(kernel, module._tensors(64), 700, [10**6, 10**6 + 1], 1)
    (problem,) = caught.value.problems
    assert problem.startswith("--threads 700: could not start 700 threads on 2 CPUs (1000000, 1000001)")
    assert problem.endswith("; give fewer") and "\n" not in problem


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"setup": {}, "cases": 3}'])
def test_a_comparison_is_added_to_a_comparison_only(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module: Any = importlib.import_module("compare_deepspeed")
    path = tmp_path / "o.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["compare_deepspeed.py", "--nproc", "2", "--add", "--out", str(path)])
    with pytest.raises(UserError) as caught:
        module.main()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: is no result of a comparison") and path.read_text() == text


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module: Any = importlib.import_module("command_line")
    path = tmp_path / "o.json"
    module.write_result(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: full_disk())
        with pytest.raises(UserError) as caught:
            module.write_result(path, "new")
    assert caught.value.problems == (f"{path}: cannot be written: No space left on device; change --out",)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    args = ["--params", "64", "--threads", "1", "--repeats", "1", "--out", "/dev/full"]
    done = run_script("cpu_adamw.py", *args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: /dev/full: cannot be written: No space left on device; change --out\n"
    assert not Path("/dev/full").is_file()
