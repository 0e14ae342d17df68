"""`heavylift bench`: what the result says, that it follows from the steps, and how bad input ends."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Finished, command_env, heavylift_command

from heavylift.errors import UserError
from heavylift.offload.policy import CALM_STEPS
from heavylift.train.bench import finite, offload_summary, speeds, spread
from heavylift.train.bench_request import BenchRequest
from heavylift.train.metrics import StepMetrics
from heavylift.train.waits import StepWaits

ROOT = Path(__file__).parents[1]
Run = Callable[..., Finished]


def metrics(step: int, step_s: float, tflop: float = 2.0) -> StepMetrics:
    return StepMetrics(step, 5.0, 1.0, 1e-5, step_s, 64, 64 / step_s, tflop / step_s, tflop / 2 / step_s, 1.0, 2.0, 0.0)


class TestStatistics:
    def test_speeds_are_those_of_the_median_step(self) -> None:
        found = speeds([metrics(1, 1.0), metrics(2, 4.0), metrics(3, 2.0)])
        assert found["step_s"] == {"median": 2.0, "min": 1.0, "max": 4.0, "q1": 1.5, "q3": 3.0}
        assert (found["tokens_per_s"], found["tflops"], found["model_tflops"]) == (32.0, 1.0, 0.5)

    def test_one_step_is_its_own_spread(self) -> None:
        assert set(spread([0.25]).values()) == {0.25}

    def test_hidden_counts_seconds_not_steps(self) -> None:
        def waits(step: int, cpu_s: float, exposed_s: float) -> StepWaits:
            return StepWaits(step, "deferred", cpu_s, 0, 0, 0, 0, 0, 0, 0, 0, 0, exposed_s)

        summary = offload_summary([waits(1, 9.0, 0.0), waits(2, 1.0, 1.0)])
        assert summary is not None
        assert summary["hidden"] == pytest.approx(0.9) and summary["cpu_s"] == 5.0
        assert offload_summary([]) is None
        nothing = offload_summary([waits(1, 0, 0)])
        assert nothing is not None and nothing["hidden"] is None

    def test_numbers_that_are_not_finite_become_null(self) -> None:
        assert finite({"a": [math.nan, {"b": -math.inf}], "c": 1.5, "d": "nan"}) == {
            "a": [None, {"b": None}],
            "c": 1.5,
            "d": "nan",
        }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that would save a model over an old run folder, were it trained."""
    folder = tmp_path_factory.mktemp("bench")
    content: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": str(ROOT / "examples/shapes/tiny_llama"), "init": "random"},
        "data": {"format": "random", "cutoff_len": 32, "num_samples": 32},
        "train": {"output_dir": str(folder / "run"), "max_steps": CALM_STEPS + 3, "max_grad_norm": 1e4},
        "engine": {"offload_optimizer": "host", "ratio": 0.6},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def read(path: Path) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def result(recipe: Path, run_heavylift: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The result of a run on two processes, and what it printed."""
    out, tmp = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("tmp")
    ended = run_heavylift(
        "bench", recipe, "--nproc=2", "--warmup=2", "--out", out / "new", env={"TMPDIR": str(tmp)}, cwd=recipe.parent
    )
    assert ended.rc == 0, ended.stderr
    assert [path.name for path in (out / "new").iterdir()] == ["tiny.json"], "named after the recipe"
    assert not (recipe.parent / "run").exists(), "the recipe's own run folder is not touched"
    assert not [path for path in tmp.iterdir() if path.name.startswith("heavylift")], "the run is thrown away"
    return read(out / "new" / "tiny.json"), ended.stdout


def test_statistics_leave_out_the_warm_up(result: tuple[dict[str, Any], str]) -> None:
    found, said = result
    steps = found["steps"]
    assert [step["step"] for step in steps] == list(range(1, CALM_STEPS + 4)) and found["num_warmup_steps"] == 2
    seconds = [step["step_s"] for step in steps[2:]]
    assert found["step_s"]["median"] == statistics.median(seconds)
    assert (found["step_s"]["min"], found["step_s"]["max"]) == (min(seconds), max(seconds))
    assert found["tokens_per_s"] == pytest.approx(2 * 32 / found["step_s"]["median"])
    assert found["first_step_s"] == steps[0]["step_s"] and found["start_to_first_step_s"] > 0
    assert 0 < found["model_tflops"] < found["tflops"]
    assert f"{found['step_s']['median']:.3f}s median" in said and "tiny.json" in said.splitlines()[-1]


def test_the_setup_and_the_machine_are_told(result: tuple[dict[str, Any], str]) -> None:
    found, _ = result
    setup = found["setup"]
    assert (setup["num_processes"], setup["micro_batch"], setup["seq"], setup["stage"]) == (2, 1, 32, 3)
    assert (setup["tier"], setup["ratio"], setup["schedule"], setup["max_grad_norm"]) == ("host", 0.6, "auto", 1e4)
    assert found["model"]["num_params"] == 869504 and found["model"]["num_hidden_layers"] == 4
    assert found["recipe"]["data"]["num_samples"] == 32 and "output_dir" not in found["recipe"]["train"]
    assert found["recipe"]["export"]["save"] is False
    assert found["machine"]["cores"] >= 1 and found["machine"]["host_gib"] > 0.5
    assert found["versions"]["torch"] and found["versions"]["transformers"]
    assert found["peak_host_gib"] > 0.1


def test_each_step_says_which_schedule_ran_and_what_it_waited_for(result: tuple[dict[str, Any], str]) -> None:
    steps = result[0]["steps"]
    schedules = [step["schedule"] for step in steps]
    # the norm never comes near the limit, so `auto` begins to speculate once it has seen so many calm steps
    assert schedules == ["deferred"] * CALM_STEPS + ["speculative"] * 3
    # a deferred step is done by the end of the next forward; a speculative one may as well end in the next step as in
    # its own, so that all or nothing of it may be counted there
    assert all(step["cpu_s"] > 0 for step in steps[1 : CALM_STEPS + 1])
    assert sum(step["cpu_s"] for step in steps[CALM_STEPS:]) > 0
    assert all(step["gradient_s"] == 0 for step in steps), "there is no copy to wait for on a CPU"
    assert all(0 < step["grad_norm"] < 1e4 and not step["clipped"] and not step["skipped"] for step in steps)
    assert all(step["exposed_s"] <= step["cpu_s"] + step["slot_s"] + step["issue_s"] + 1e-9 for step in steps)
    summary = result[0]["offload"]
    assert summary["cpu_s"] == pytest.approx(statistics.fmean(step["cpu_s"] for step in steps[2:]))
    assert 0 <= summary["hidden"] <= 1


def test_clipping_accumulation_and_profile(recipe: Path, run_heavylift: Run, tmp_path: Path) -> None:
    values = ["train.max_grad_norm=0.01", "train.gradient_accumulation_steps=2", "train.profile=true"]
    (tmp_path / "two.json").write_text("an older result")
    args = [*values, "train.max_steps=3", "--nproc=1", "--warmup=0", "--out", tmp_path, "--name=two", "--overwrite"]
    ended = run_heavylift("bench", recipe, *args)
    assert ended.rc == 0, ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"two.json", "two.trace.json"}
    assert any(e["name"].startswith("accumulate ") for e in read(tmp_path / "two.trace.json")["traceEvents"])
    steps = read(tmp_path / "two.json")["steps"]
    assert [(step["schedule"], step["clipped"]) for step in steps] == [("deferred", True)] * 3
    # the worker adds beside backward: how much of that training waits for depends on the machine, that it was done not
    assert all(step["accumulate_s"] > 0 for step in steps)
    work = ("cpu_s", "accumulate_s", "slot_s", "issue_s")
    assert all(0 <= step["exposed_s"] <= sum(step[name] for name in work) + 1e-9 for step in steps)


def test_without_a_host_tier_there_is_nothing_to_hide(recipe: Path, run_heavylift: Run, tmp_path: Path) -> None:
    values = ["engine.offload_optimizer=device", "train.max_steps=2"]
    ended = run_heavylift("bench", recipe, *values, "--nproc=1", "--warmup=1", "--out", tmp_path)
    assert ended.rc == 0, ended.stderr
    found = read(tmp_path / "tiny.json")
    assert found["offload"] is None and found["pinned_gib"] == 0 and found["setup"]["ratio"] == 0
    assert [step["schedule"] for step in found["steps"]] == [None, None]
    assert "offload" not in ended.stdout


class TestBadInput:
    def test_everything_is_told_at_once_before_anything_runs(
        self, recipe: Path, run_heavylift: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "old.json").write_text("{}")
        args = ["--warmup=9", "--name=old", "--out", tmp_path, "model.model_name_or_path=no/such/folder"]
        ended = run_heavylift("bench", recipe, *args)
        assert ended.rc == 2 and "Traceback" not in ended.stderr
        assert len(ended.errors) == 3, ended.stderr
        said = "\n".join(ended.errors)
        assert "no/such/folder" in said and "--warmup: expected fewer than the 7 steps" in said
        assert "old.json: exists" in said and "--overwrite" in said
        assert (tmp_path / "old.json").read_text() == "{}"

    @pytest.mark.parametrize("name", ["a/b", "", ".hidden"])
    def test_a_name_is_no_path(self, recipe: Path, run_heavylift: Run, tmp_path: Path, name: str) -> None:
        ended = run_heavylift("bench", recipe, "--name", name, "--out", tmp_path)
        assert ended.rc == 2 and [line.startswith("--name: ") for line in ended.errors] == [True]

    def test_a_folder_that_is_a_file(self, recipe: Path, run_heavylift: Run, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        ended = run_heavylift("bench", recipe, "--out", tmp_path / "file")
        assert ended.rc == 2 and len(ended.errors) == 1 and "change --out" in ended.errors[0]

    @pytest.mark.parametrize(
        ("limit_kib", "said"),
        [
            (1, "recipe.yaml: cannot be written: File too large; free the disk or set TMPDIR"),
            (3, "tiny.json: cannot be written (File too large); change --out or --name"),
        ],
    )
    def test_a_full_disk_leaves_no_half_result(self, recipe: Path, tmp_path: Path, limit_kib: int, said: str) -> None:
        # no file may grow beyond that: writes really fail
        limited = ["bash", "-c", f'ulimit -f {limit_kib}; exec "$@"', "bash"]
        line = [*limited, *heavylift_command(), "bench", recipe, "--nproc", "1"]
        more = ["--warmup", "0", "train.max_steps=1", "--out", tmp_path]
        done = subprocess.run(
            [*line, *more], env=command_env(), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert error.endswith(said)
        assert list(tmp_path.iterdir()) == []

    def test_warm_up_leaves_a_step(self) -> None:
        BenchRequest("n", "p", 1, 0.0).check(2)
        with pytest.raises(UserError, match="^--warmup: expected fewer than the 2 steps of the run, got 2; raise"):
            BenchRequest("n", "p", 2, 0.0).check(2)

    @pytest.mark.soak
    def test_warm_up_is_checked_where_only_the_data_know_the_number_of_steps(
        self, recipe: Path, run_heavylift: Run, tmp_path: Path
    ) -> None:
        args = ["train.max_steps=null", "data.num_samples=2", "--nproc=1", "--out", tmp_path]
        ended = run_heavylift("bench", recipe, *args)
        assert ended.rc == 2 and ended.errors == [
            "--warmup: expected fewer than the 2 steps of the run, got 3; raise train.max_steps or lower --warmup"
        ]
        assert list(tmp_path.iterdir()) == []

    def test_under_torchrun(self, recipe: Path, run_heavylift: Run) -> None:
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        ended = run_heavylift("bench", recipe, env=ranks)
        assert ended.rc == 2 and len(ended.errors) == 1 and "without torchrun" in ended.errors[0]


@pytest.mark.soak
def test_the_comparison_goes_on_after_a_failure(tmp_path: Path) -> None:
    """DeepSpeed is not there, or has no GPU; its failure is written down, and only it is tried again."""
    out = tmp_path / "comparison.json"
    script = [sys.executable, str(ROOT / "benchmarks/compare_deepspeed.py"), "--nproc=1", "--size=tiny", "--seq=16"]
    script += ["--steps=2", "--warmup=1", "--out", str(out)]

    def compare(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*script, *more], env=command_env(), capture_output=True, text=True, timeout=300)

    cases = "deepspeed-zero-offload-clip1,heavylift-device,heavylift-host90-calm"
    done = compare("--cases", cases)
    assert done.returncode == 1, done.stderr
    found = read(out)
    assert found["setup"] == {"nproc": 1, "size": "tiny", "micro_batch": 2, "seq": 16}
    failed, device, host = (found["cases"][case] for case in cases.split(","))
    assert failed["failed"].startswith("exit code") and failed["output"]
    assert (device["setup"]["tier"], host["setup"]["tier"], host["setup"]["ratio"]) == ("device", "host", 0.9)
    assert host["setup"]["gradient_checkpointing"] and len(host["steps"]) == 2
    ratio = host["tokens_per_s"] / device["tokens_per_s"]
    assert found["ratios"]["heavylift-host90-calm"] == {"heavylift-device": pytest.approx(ratio)}
    assert f"{ratio:.3f}" in next(
        line for line in done.stdout.splitlines() if line.startswith("heavylift-host90-calm  ")
    )

    assert compare().returncode == 2, "the file exists"
    again = compare("--add", "--cases", "heavylift-device,heavylift-host90-clipped")
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if line.endswith(" ...")] == ["heavylift-host90-clipped ..."]
    assert read(out)["cases"]["heavylift-device"] == device
    assert set(read(out)["cases"]) == {"heavylift-device", "heavylift-host90-calm", "heavylift-host90-clipped"}
