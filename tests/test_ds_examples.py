"""The 70B program of examples/deepspeed, launched as its first lines say, in miniature."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Finished, command_env

from heavylift.config.schema import DataConfig, ModelConfig, Recipe, TrainConfig
from heavylift.data.batches import BatchPlan
from heavylift.data.tokenise import load_samples
from heavylift.errors import UserError
from heavylift.memory.machine import host_available_bytes
from heavylift.train.metrics import StepMetrics, read_metrics
from heavylift.train.schedules import lr_multiplier

ROOT = Path(__file__).parent.parent
LLAMA = ROOT / "examples" / "deepspeed" / "llama_3_3_70b"
DATA = ROOT / "examples" / "data" / "alpaca_small.jsonl"
SHAPE = ROOT / "examples" / "shapes" / "tiny_llama"
BATCH, SEED = 2, 42


def finetune(*args: str | Path, cwd: Path, **env: str) -> Finished:
    """finetune.sh as a user of this Python runs it, on two processes."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(LLAMA / "finetune.sh"), *map(str, args)],
        cwd=cwd,
        env=command_env(PATH=path, XDG_CACHE_HOME=str(cwd / "cache"), **{"NUM_GPUS": "2", **env}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def rates(num_steps: int, lr: float, warmup_ratio: float) -> list[float]:
    config = TrainConfig(output_dir="unused", learning_rate=lr, warmup_ratio=warmup_ratio)
    return [lr * lr_multiplier(step, num_steps, config) for step in range(num_steps)]


def printed_rates(run: Finished) -> list[str]:
    return re.findall(r"lr: (\S+)", run.stdout)


# ---- superoffload, as it stands: random weights, random tokens -------------------------------------------------------


def test_superoffload_on_random_weights(tmp_path: Path) -> None:
    run = finetune(
        "superoffload", BATCH, "--max_length", 64, "--bench_steps", 4, "--warmup_steps", 1, "--warmup_ratio", 0.5,
        "--deterministic", cwd=tmp_path, MODEL=str(SHAPE), OUTPUT_DIR="run",
    )  # fmt: skip
    assert run.rc == 0, run.stderr
    assert "RANDOM WEIGHTS" in run.stdout and "RANDOM TOKENS" in run.stdout
    config = json.loads((tmp_path / "run" / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == BATCH and config["bf16"] == {"enabled": True}
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True,
            "ratio": 0.9,
            "super_offload": True,
            "cpuadam_cores_perc": 0.9,
        },
    }
    assert config["heavylift"] == {"state_format": "split", "gradients_on": "device"}
    assert "in place of" not in run.stdout, "without a GPU there is nowhere else to put the states"
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl").steps
    assert len(steps) == 4
    expected = rates(4, 1e-5, 0.5)
    assert [m.lr for m in steps] == pytest.approx(expected, rel=1e-12)
    assert printed_rates(run) == [f"{rate:.1e}" for rate in expected]
    # weights of deviation 0.02 know nothing: ln(vocabulary), and the variance of the logits adds a little
    assert steps[0].loss == pytest.approx(6.24, abs=0.15)
    assert all(m.tokens == 2 * BATCH * 64 for m in steps)
    # where a step waited, as under `heavylift train`
    assert all(m.collective_wait_s > 0 for m in steps)
    told = [line for line in run.stdout.splitlines() if line.startswith("step: ")]
    assert all("  collectives: " in line and "  offload: cpu " in line for line in told) and len(told) == 4
    check_summary(run, steps, num_left_out=1)


def check_summary(run: Finished, steps: tuple[StepMetrics, ...], num_left_out: int) -> None:
    measured = steps[num_left_out:]
    seconds = sum(m.step_s for m in measured)
    found = re.search(r"means of (\d+) steps \((\d+) left out\): (\S+) s a step, (\S+) tokens/s", run.stdout)
    assert found is not None, run.stdout
    assert (int(found[1]), int(found[2])) == (len(measured), num_left_out)
    assert float(found[3]) == pytest.approx(seconds / len(measured), abs=1e-3)
    assert float(found[4].replace(",", "")) == pytest.approx(sum(m.tokens for m in measured) / seconds, abs=1)


# ---- zerooffload on a checkpoint with its tokenizer ------------------------------------------------------------------


def first_batches(folder: Path, max_length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, shifted labels) of both ranks in step 1, from heavylift's own data path."""
    from transformers import AutoTokenizer

    recipe = Recipe(
        model=ModelConfig(model_name_or_path=str(folder)),
        data=DataConfig(dataset=str(DATA), cutoff_len=max_length, overlong="truncate"),
        train=TrainConfig(output_dir="unused"),
    )
    samples = load_samples(recipe, lambda: AutoTokenizer.from_pretrained(folder), folder.parent / "cache", 128, None)
    plan = BatchPlan(samples, BATCH, 1, 2, SEED)
    batches = [plan.micro_batches(0, rank)[0] for rank in range(2)]
    return [(batch.input_ids, batch.labels) for batch in batches]


def mean_loss(model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Over the tokens that have a label, of all rows."""
    total, num = 0.0, 0
    with torch.no_grad():
        for ids, labels in batches:
            logits = model(input_ids=ids).logits.float().flatten(0, 1)
            total += float(F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum"))
            num += int((labels != -100).sum())
    return total / num


@pytest.mark.soak
def test_zerooffload_on_a_checkpoint(tmp_path: Path, tiny_llama_copy: Path) -> None:
    from transformers import AutoModelForCausalLM

    # a model that is sure of a pad after a pad, so that it matters which tokens the loss is taken over
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_copy, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = model.lm_head.weight[0] = torch.linspace(-1, 1, 32)
    model.save_pretrained(tiny_llama_copy)
    run = finetune(
        "zerooffload", BATCH, "--max_length", 96, "--lr", 3e-3, "--num_train_epochs", 2, "--dataset_percentage", 100,
        "--dataset", DATA, "--save_model", "--save_checkpoint", cwd=tmp_path, MODEL=str(tiny_llama_copy),
        OUTPUT_DIR="run",
    )  # fmt: skip
    assert run.rc == 0, run.stderr
    assert "RANDOM" not in run.stdout
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl").steps
    assert [m.lr for m in steps] == pytest.approx(rates(len(steps), 3e-3, 0.05), rel=1e-12)
    batches = first_batches(tiny_llama_copy, 96)
    trained_only = mean_loss(model.to(torch.bfloat16), batches)
    shifted = [F.pad(ids[:, 1:], (0, 1), value=-100) for ids, _ in batches]
    everything = mean_loss(model, [(ids, labels) for (ids, _), labels in zip(batches, shifted, strict=True)])
    # bfloat16 keeps 8 bits of each logit; the loss over prompts and pads is another one
    assert steps[0].loss == pytest.approx(trained_only, rel=2e-3)
    assert abs(trained_only - everything) > 10 * 2e-3 * trained_only
    assert steps[-1].loss < steps[0].loss - 0.5
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.bfloat16)
    assert mean_loss(saved, batches) < trained_only - 0.5
    assert (tmp_path / "run" / "checkpoint" / "latest").is_file()


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "expected superoffload or zerooffload, got ''"),
        (("offload",), "expected superoffload or zerooffload, got 'offload'"),
        (("superoffload", "four"), "BATCH_SIZE: expected a whole number from 1, got 'four'"),
        (("zerooffload", "0"), "BATCH_SIZE: expected a whole number from 1, got '0'"),
        (("zerooffload", ""), "BATCH_SIZE: expected a whole number from 1, got ''"),
    ],
)
def test_usage(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    run = finetune(*args, cwd=tmp_path)
    assert run.rc == 2 and run.stdout == ""
    usage = "usage: finetune.sh superoffload|zerooffload [BATCH_SIZE] [switches of finetune.py]"
    assert run.stderr.splitlines() == [f"error: {said}; {usage}"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env", "said"),
    [
        *(
            ({"RATIO": r}, f"RATIO: expected a number from 0 to 1, like 0.85, got '{r}'")
            for r in ("2", ".5", "1.", "0.", "half")
        ),
        *(({"NUM_GPUS": n}, f"NUM_GPUS: expected a whole number from 1, got '{n}'") for n in ("0", "four")),
        ({"MODEL": "nope"}, "nope: no such model folder; change --model_name (finetune.sh: MODEL)"),
        ({"OUTPUT_DIR": "file/run"}, "--output_dir file/run: cannot make the folder, as {file} is no folder or cannot"),
        ({"OUTPUT_DIR": "/proc/no/folder"}, ""),  # who may try is root
    ],
)
def test_what_cannot_become_a_ds_config(env: dict[str, str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    run = finetune("superoffload", cwd=tmp_path, **env)
    assert run.rc == 2 and run.stdout == "" and run.stderr.startswith(f"error: {said.format(file=file)}")
    assert run.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == [file]


def test_files_that_are_not_there_are_told_together(tmp_path: Path) -> None:
    switches = ("--dataset", "a.jsonl", "--chat_template", "b.jinja", "--tokenizer_name", "c")
    run = finetune("superoffload", *switches, cwd=tmp_path, MODEL=str(DATA))
    assert (run.rc, run.stdout) == (2, "") and run.stderr.splitlines() == [
        f"error: {DATA}: expected a model folder, got a file; change --model_name (finetune.sh: MODEL)",
        "error: c: no such model folder; change --tokenizer_name",
        "error: a.jsonl: no such file; change --dataset",
        "error: b.jinja: no such file; change --chat_template",
    ]
    assert not list(tmp_path.iterdir())


def test_help_writes_nothing(tmp_path: Path) -> None:
    run = finetune("zerooffload", 8, "--help", cwd=tmp_path)
    assert (run.rc, run.stderr) == (0, "") and run.stdout.startswith("usage: finetune.py [-h] --model_name")
    assert not list(tmp_path.iterdir())


def test_a_wrong_switch_leaves_an_earlier_runs_ds_config(tmp_path: Path) -> None:
    config = tmp_path / "runs" / "llama_3_3_70b_superoffload" / "ds_config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    run = finetune("superoffload", 2, "--lr", "-1", cwd=tmp_path)
    assert (run.rc, run.stdout, run.stderr) == (2, "", "error: --lr -1: expected at least 0\n")
    assert config.read_text() == "{}"


def test_a_model_of_an_earlier_run_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    switches = ("--max_length", 64, "--bench_steps", 1, "--save_model")
    run = finetune("superoffload", 2, *switches, cwd=tmp_path, MODEL=str(SHAPE), OUTPUT_DIR="run")
    assert run.rc == 2 and run.stdout.count("step:") == 0
    assert "error: run/model: there already, from an earlier run; move it away, or choose another --output_dir" in (
        run.stderr
    )
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "model"]


@pytest.mark.soak
def test_states_that_cannot_fit_are_told_at_once(tmp_path: Path) -> None:
    """As it stands: the 70B on random weights. Only its shape is built before the host's memory is looked at."""
    if torch.cuda.is_available() or host_available_bytes() > 700 * 2**30:
        pytest.skip("this machine has room for the states of a 70B model, and would go on")
    run = finetune("superoffload", cwd=tmp_path)
    assert run.rc == 2 and "Traceback" not in run.stderr
    assert "step: 1" not in run.stdout
    # 10 bytes of states and 2 of the parameter for each of 70,553,706,496 are 788.5 GiB; staging comes on top
    found = [re.search(r"host memory: parameters and optimizer states need (\S+) GiB", line) for line in run.errors]
    assert any(one is not None and 788.5 < float(one[1]) < 810 for one in found), run.errors
    assert json.loads((tmp_path / "runs" / "llama_3_3_70b_superoffload" / "ds_config.json").read_text())


# ---- the ratio that the host has room for ----------------------------------------------------------------------------

PLACE = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
folder, model, outputs, cases = sys.argv[1:]
sys.path.insert(0, folder)
from arguments import parse_arguments, recipe_of
from placement import Placement
from heavylift.config.deepspeed.parse import load_settings
from heavylift.errors import UserError
from heavylift.memory.machine import MachineMemory
from heavylift.models.load import load_hf_config
from heavylift.ranks import Ranks

GIB = 2**30
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
ranks = Ranks(rank=0, world_size=4, local_rank=0, local_world_size=4, device=torch.device("cpu"))
needed = ["--model_name", model, "--output_dir", "o", "--deepspeed_config", "c"]
args = parse_arguments([*needed, "--activation_checkpointing"])
recipe = recipe_of(args, has_weights=False, has_tokenizer=False, rows_per_step=16)
# as on a GPU
recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": True})})
hf_config = load_hf_config(Path(model), False)
settings = {mode: load_settings(f"{outputs}/{mode}/ds_config.json", 4) for mode in ("superoffload", "zerooffload")}
placements = {mode: Placement(recipe, hf_config, one, ranks, args.max_length) for mode, one in settings.items()}
found = []
for mode, host_gib, device_gib, fit_ratio in json.loads(cases):
    placement = placements[mode]
    free = MachineMemory(int(host_gib * GIB), None if device_gib is None else int(device_gib * GIB))
    try:
        placed, said = placement.place(free, fit_ratio=fit_ratio)
    except UserError as error:
        found.append({"problems": error.problems})
        continue
    plan = placement.plan(placed.offload.ratio)
    assert replace(placed, offload=settings[mode].offload) == settings[mode], "nothing but the ratio is another"
    found.append({"ratio": placed.offload.ratio, "said": said, "device": plan.device_bytes / GIB,
                  "host": 4 * plan.host_bytes / GIB})
print(json.dumps(found))
"""


def launched(folder: Path, mode: str, **env: str) -> list[str]:
    """The command that finetune.sh ends in, which is not run; its ds_config.json goes to FOLDER/MODE."""
    launcher = folder / "bin" / "heavylift"  # in the command's place
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    path = f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(LLAMA / "finetune.sh"), mode],
        env=command_env(PATH=path, OUTPUT_DIR=str(folder / mode), **env),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_ratio_that_somebody_has_given_is_not_fitted(tmp_path: Path) -> None:
    assert "--fit_ratio" in launched(tmp_path, "superoffload")
    words = launched(tmp_path, "superoffload", RATIO="0.8")
    assert "--fit_ratio" not in words and words[0] == "launch" and "--deepspeed_config" in words
    config = json.loads((tmp_path / "superoffload" / "ds_config.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"]["ratio"] == 0.8


def place(folder: Path, cases: list[tuple[str, float, float | None, bool]]) -> list[dict[str, Any]]:
    """What the program would do with the 70B shape on four ranks, for each (mode, GiB free on host and device, whether
    with --fit_ratio). No rank is started; the ds_configs are those that finetune.sh writes."""
    for mode in ("superoffload", "zerooffload"):
        assert "--fit_ratio" in launched(folder, mode)
    shape = ROOT / "examples" / "shapes" / "llama_3_3_70b"
    command = [sys.executable, "-c", PLACE, *map(str, (LLAMA, shape, folder)), json.dumps(cases)]
    done = subprocess.run(command, env=command_env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def plan_line(name: str, found: dict[str, Any]) -> str:
    return (
        f"# plan, {name}: {found['ratio']:.2f} of the states on the host: {found['device']:.1f} GiB on each GPU at the "
        f"peak, {found['host']:.0f} GiB of host memory"
    )


def test_the_70b_shape_fits_four_gpus_with_512_gib_of_host_memory(tmp_path: Path) -> None:
    told = (LLAMA / "finetune.sh").read_text().splitlines()
    cases: list[tuple[str, float, float | None, bool]] = [
        ("superoffload", 1500, 139.5, True),
        ("superoffload", 505, 139.5, True),
        ("superoffload", 505, 139.5, False),
        ("superoffload", 505, None, True),
        ("superoffload", 150, 139.5, True),
        ("zerooffload", 1500, 139.5, True),
        ("zerooffload", 505, 139.5, True),
    ]
    first, second, insists, on_cpu, small, all_of_them, some = place(tmp_path, cases)
    assert (first["ratio"], first["said"]) == (0.9, None)
    assert plan_line("superoffload", first) in told
    assert second["ratio"] < 0.9 and second["host"] < 505 and second["device"] < 139.5
    assert plan_line("505 GiB free", second) in told
    assert second["said"] == (
        f"ratio {second['ratio']:.2f} in place of 0.90: the host has 505.0 GiB free; {second['host']:.1f} are needed "
        f"with {second['ratio']:.2f}, {first['host']:.1f} with 0.90 (RATIO=0.90 insists on it)"
    )
    # a ratio that somebody has given is not changed, but what would fit is told
    (problem,) = insists["problems"]
    assert problem.startswith(f"host memory: the optimizer states need {first['host']:.1f} GiB on this machine")
    assert "what would fit: RATIO=0.6" in problem and "engine." not in problem and "train." not in problem
    assert on_cpu["problems"][0].startswith("host memory: parameters and optimizer states need ")
    # with little on the host there is too much left for the GPUs
    assert len(small["problems"]) == 1 and small["problems"][0].startswith("device memory: ")
    assert (all_of_them["ratio"], all_of_them["said"]) == (1.0, None)
    assert plan_line("zerooffload", all_of_them) in told and some["ratio"] == second["ratio"]


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from finetune import main
from heavylift.memory.machine import MachineMemory
main(sys.argv[4:], MachineMemory(int(sys.argv[2]), int(sys.argv[3])))
"""


def test_a_host_too_small_for_the_ratio_gets_a_lower_one(tmp_path: Path) -> None:
    """One process, told that so much memory is free; the run is real."""
    states = 10 * 869_504  # of the shape
    # 12% stay free
    host = int(0.6 * states / 0.88)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.9}},
        "heavylift": {"state_format": "split", "gradients_on": "device"},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    arguments = ["--model_name", SHAPE, "--output_dir", "run", "--deepspeed_config", "ds_config.json"]
    arguments += ["--max_length", 64, "--bench_steps", 2, "--fit_ratio"]
    run = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, (LLAMA, host, 20 * 2**30, *arguments))],
        cwd=tmp_path,
        env=command_env(XDG_CACHE_HOME=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"^ratio (\S+) in place of 0.90: the host has 0.0 GiB free; ", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout
    assert 0 < float(found[1]) < 0.9
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl").steps) == 2


@pytest.mark.soak
def test_data_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    run = finetune("superoffload", "--dataset", DATA, cwd=tmp_path, MODEL=str(SHAPE), OUTPUT_DIR="run")
    assert run.rc == 2
    assert [line for line in run.errors if "no tokenizer, which --dataset needs" in line]
    assert "Traceback" not in run.stderr


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "switches, named",
    [
        (["--lr", "-1", "--max_length", "1"], ["--lr -1", "--max_length 1"]),
        (["--bench_steps", "3", "--warmup_steps", "3"], ["--warmup_steps 3"]),
        (["--dataset_percentage", "0"], ["--dataset_percentage 0"]),
        (["--dataset", "a", "--dataset_name", "b"], ["--dataset and --dataset_name"]),
        (["--learning_rate", "1"], ["unrecognized arguments: --learning_rate"]),
        (["--batch_size", "many"], ["--batch_size: invalid int value: 'many'"]),
    ],
)
def test_arguments(switches: list[str], named: list[str]) -> None:
    arguments = load(LLAMA / "arguments.py")
    needed = ["--model_name", "m", "--output_dir", "o", "--deepspeed_config", "c"]
    assert arguments.parse_arguments(needed).lr == 1e-5
    with pytest.raises(UserError) as caught:
        arguments.parse_arguments([*needed, *switches])
    assert len(caught.value.problems) == len(named)
    for problem, word in zip(sorted(caught.value.problems), sorted(named), strict=True):
        assert word in problem


@pytest.mark.parametrize(
    ("arguments", "blocked", "said"),
    [
        (
            ["--output_dir", "{file}/run"],
            None,
            "error: --output_dir {file}/run: cannot make the folder, as {file} is",
        ),
        ([], "metrics.jsonl", "error: --output_dir run: metrics.jsonl in it is a folder; move it away"),
        ([], "ds_config.json", "error: OUTPUT_DIR: cannot write the file 'run/ds_config.json'"),
        (
            ["--bench_steps", 99_999_999],
            None,
            "error: num_samples: Input should be less than or equal to 100000000",
        ),
        (["--num_train_epochs", "1e9"], None, "error: num_train_epochs: Input should be less than or equal to"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[Any], blocked: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    if blocked is not None:
        (tmp_path / "run" / blocked).mkdir(parents=True)
    arguments = [str(argument).format(file=file) for argument in arguments]
    run = finetune("superoffload", 2, *arguments, cwd=tmp_path, MODEL=str(SHAPE), OUTPUT_DIR="run", NUM_GPUS="1")
    assert run.rc == 2
    lines = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and lines[0].startswith(said.format(file=file)), run.stderr
    assert "Traceback" not in run.stderr


def test_the_programs_words_are_those_of_its_switches_and_scripts() -> None:
    words, arguments = load(LLAMA / "words.py"), (LLAMA / "arguments.py").read_text()
    script = (LLAMA / "finetune.sh").read_text()
    for key, word in words.SWITCHES.items():
        section, _, name = key.partition(".")
        assert name in Recipe.model_fields[section].annotation.model_fields, key
        word = word.split()[0]
        if word.startswith("--"):
            assert f'add("{word}"' in arguments, word
        else:
            assert "${" + word + ":-" in script or f'"{word.removeprefix("heavylift.")}": ' in script, word
    said = "lower data.cutoff_len, or train.num_train_epochs. Not engine.ratios, a/data.dataset or data.dataset.json"
    assert words.in_own_words(said) == (
        "lower --max_length, or --num_train_epochs. Not engine.ratios, a/data.dataset or data.dataset.json"
    )
