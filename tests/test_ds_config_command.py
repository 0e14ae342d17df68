"""`heavylift config explain` and `convert` as commands: tables, recipes, one line per problem and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, command_env
from ds_configs import FOLDER, all_config_files, own_world_size, write_config
from typer.testing import CliRunner

from heavylift.cli.main import app
from heavylift.config.deepspeed.convert import _MONITOR_OPTIONS, convert
from heavylift.config.deepspeed.parse import interpret
from heavylift.config.deepspeed.schema import DeepSpeedConfig
from heavylift.config.recipe import load_recipe

SUPEROFFLOAD = FOLDER / "superoffload_llama_70b.json"


def run(*arguments: str | Path) -> Finished:
    """`heavylift config ...` in this process."""
    done = CliRunner().invoke(app, ["config", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Finished(done.exit_code, done.stdout, done.stderr)


@pytest.mark.parametrize("path", all_config_files(), ids=lambda path: path.stem)
def test_explain_every_posted_config(path: Path) -> None:
    done = run("explain", path)
    assert done.rc == 0 and done.stderr == ""
    assert "key by key" in done.stdout and "what it comes to" in done.stdout and "world size" in done.stdout
    first = next(iter(json.loads(path.read_text()))) if path.stem != "commented_hjson_style" else "gradient_clipping"
    assert first in done.stdout


def test_explain_says_status_and_settings() -> None:
    done = run("explain", SUPEROFFLOAD, "--world-size", "4")
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert ["offload.ratio", "0.9"] in rows and ["batch.micro_batch", "4"] in rows and ["offload.tier", "host"] in rows
    sub_group = next(row for row in rows if row[0].startswith("zero_optimization.sub_group"))
    assert "4e+08" in sub_group and "no" in sub_group and "effect" in sub_group
    assert "note: zero_optimization.sub_group_size: no effect" in done.stdout
    assert "world size 4\n" in done.stdout


def test_the_world_size_is_what_the_batch_keys_ask_for(tmp_path: Path) -> None:
    batch = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert "world size 6, from the batch keys" in run("explain", write_config(tmp_path, batch)).stdout
    wrong = run("explain", write_config(tmp_path, batch), "--world-size", "4")
    assert wrong.rc == 2 and "48 (file) = 4 (file) * 2 (file) * 4 (launcher)" in wrong.errors[0]


def test_explain_shows_the_table_of_a_bad_file_and_then_its_problems(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"train_batch_size": 8, "bf16": {"enabled": "true"}, "bogus": 1})
    done = run("explain", path)
    assert done.rc == 2
    assert done.errors == [
        f"{path}:1: bogus: unknown key; remove it (known: docs/deepspeed_config.md)",
        f"{path}:1: bf16.enabled: expected true or false, got 'true'; remove the quotes",
    ]
    assert "bogus" in done.stdout and "error" in done.stdout and "what it comes to" not in done.stdout


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_memory_plan_of_a_model(tmp_path: Path, tiny_llama_dir: Path, stage: int) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": stage}
    if stage > 0:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    done = run("explain", write_config(tmp_path, config), "--model", tiny_llama_dir, "--world-size", "4")
    assert done.rc == 0, done.stderr
    table = done.stdout[done.stdout.index("memory plan") :]
    assert "4 ranks" in table and "free on this machine: host" in table
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert any(row.startswith("host optimizer states ") for row in rows) == (stage > 0)
    assert "all but activations" in table and "counted as AdamW's" not in table


def test_the_memory_plan_says_whose_states_it_counts(tmp_path: Path, tiny_llama_dir: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "sgd", "params": {"lr": 0.1}}}
    done = run("explain", write_config(tmp_path, config), "--model", tiny_llama_dir)
    assert done.rc == 0 and "optimizer states: counted as AdamW's; SGD may keep others" in " ".join(done.stdout.split())


def test_the_plan_is_that_of_a_run(tiny_llama_dir: Path) -> None:
    from heavylift.cli.memory_table import plan_for
    from heavylift.config.deepspeed.parse import load_settings

    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    base: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    plans = {}
    for world_size in (1, 4):
        settings = load_settings(base | {"zero_optimization": zero}, world_size)
        plans[world_size], num_params = plan_for(settings, tiny_llama_dir, world_size, None)
    # sharded over four: a quarter, but for the rows that are padded
    assert plans[1].param_bytes == 2 * num_params
    assert 0 <= 4 * plans[4].param_bytes - plans[1].param_bytes < 0.1 * plans[1].param_bytes
    assert plans[1].host_state_bytes >= 12 * num_params and plans[1].device_state_bytes == 0
    base["bf16"]["bf16_optimizer_states"] = True
    rounded, _ = plan_for(load_settings(base | {"zero_optimization": zero}, 1), tiny_llama_dir, 1, None)
    assert rounded.host_state_bytes == pytest.approx(plans[1].host_state_bytes * 8 / 12, rel=0.01)
    settings = load_settings(base | {"bf16": {"enabled": True}}, 1)
    whole, _ = plan_for(settings, tiny_llama_dir, 1, None)
    assert whole.device_state_bytes == 12 * num_params and whole.host_state_bytes == 0
    with_activations, _ = plan_for(settings, tiny_llama_dir, 1, 64)
    assert with_activations.activation_bytes > 0 == whole.activation_bytes


def test_bad_arguments(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"train_batch_size": 1})
    assert "expected a Hugging Face model folder" in run("explain", config, "--model", tmp_path).errors[0]
    assert "give its folder with --model" in run("explain", config, "--seq", "8").errors[0]
    assert "no such file" in run("explain", tmp_path / "no.json").errors[0]
    [recipe] = run("explain", tmp_path / "recipe.yaml").errors
    assert recipe.endswith("expected a ds_config.json, got a recipe (YAML); heavylift train and bench read it")
    for arguments in (["explain"], ["explain", config, "--world-size", "0"], ["convert", config], ["explian", config]):
        assert run(*arguments).rc == 2


def test_convert_writes_a_recipe_once(tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    arguments = ["convert", SUPEROFFLOAD, "--model", "some/model", "--dataset", "d.jsonl", "-o", out]
    done = run(*arguments, "--world-size", "4")
    assert done.rc == 0 and f"heavylift train {out}" in done.stdout
    recipe = load_recipe(out)
    assert recipe.model.model_name_or_path == "some/model" and recipe.data.files == ("d.jsonl",)
    assert recipe.engine.ratio == 0.9 and recipe.launch.nproc == 4 and recipe.engine.state_format == "fp32"
    assert recipe.train.output_dir == "runs/superoffload_llama_70b"
    before = out.read_text()
    again = run(*arguments)
    assert again.rc == 2 and again.errors == [f"{out}: exists and is not overwritten; change -o"]
    assert out.read_text() == before
    nowhere = run(*arguments[:-1], tmp_path / "no" / "recipe.yaml")
    assert nowhere.rc == 2 and "cannot be written" in nowhere.errors[0]


def test_convert_to_the_screen(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": True},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0}},
        "tensorboard": {"enabled": True},
        "activation_checkpointing": {"number_checkpoints": 2},
    }
    done = run("convert", write_config(tmp_path, config), "--model", "m", "--dataset", "d", "--output-dir", "out dir")
    assert done.rc == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(done.stdout)
    recipe = load_recipe(path)
    assert recipe.train.output_dir == "out dir" and recipe.launch.nproc == "auto"
    assert recipe.train.gradient_checkpointing is True and recipe.train.report_to == ("tensorboard",)
    assert recipe.train.adam_epsilon == 1e-8 and recipe.train.learning_rate == 0.01
    said = [line for line in done.stdout.splitlines() if line.startswith("# - ")]
    for start in ("fp16", "scheduler.type", "optimizer.params.eps", "activation_checkpointing.number"):
        assert any(line.startswith(f"# - {start}") for line in said), (start, said)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "rate", "remark"),
    [
        ({"type": "AdamW"}, None, 1e-3, None),
        ({"type": "AdamW", "params": {"betas": [0.8, 0.9]}}, {"type": "WarmupLR"}, 1e-3, None),
        (
            {"type": "Adam", "params": {"lr": "auto"}},
            None,
            1e-3,
            '# - optimizer.params.lr: "auto" that nobody filled in: 0.001; set train.learning_rate',
        ),
        (
            {"type": "AdamW", "params": {"lr": 0.01}},
            {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_min_lr": 0.005}},
            0.02,
            "# - scheduler.params.warmup_min_lr: 0.005; a recipe's warm-up starts from 0",
        ),
        (
            {"type": "SGD", "params": {"lr": 0.1}},
            None,
            1e-5,  # the recipe's own
            "# - optimizer.type: SGD; a recipe trains with AdamW, which takes none of optimizer.params; set "
            "train.learning_rate",
        ),
    ],
)
def test_convert_trains_at_the_rate_of_the_file(
    tmp_path: Path, optimizer: dict[str, Any], scheduler: dict[str, Any] | None, rate: float, remark: str | None
) -> None:
    config = {"train_batch_size": 1, "optimizer": optimizer} | ({"scheduler": scheduler} if scheduler else {})
    path = tmp_path / "recipe.yaml"
    done = run("convert", write_config(tmp_path, config), "--model", "m", "--dataset", "d")
    path.write_text(done.stdout)
    assert load_recipe(path).train.learning_rate == rate
    told = [line for line in done.stdout.splitlines() if line.startswith("# - ") and "step by step" not in line]
    assert told == ([remark] if remark else [])


def test_convert_takes_monitors_and_the_moments_dtype_over(tmp_path: Path) -> None:
    blocks: dict[str, dict[str, Any]] = {
        "tensorboard": {"output_path": "curves", "job_name": "try"},
        "csv_monitor": {},
        "wandb": {"project": "boats", "group": None, "team": "us"},
        "comet": {"experiment_name": "lamp", "samples_log_interval": 5, "api_key": "secret"},
    }
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    config = {
        "train_batch_size": 1,
        "bf16": bf16,
        **{name: {"enabled": True, **block} for name, block in blocks.items()},
    }
    done = run("convert", write_config(tmp_path, config), "--model", "m", "--dataset", "d")
    path = tmp_path / "recipe.yaml"
    path.write_text(done.stdout)
    train = load_recipe(path).train
    assert load_recipe(path).engine.state_format == "bf16"
    assert train.report_to == ("tensorboard", "csv", "wandb", "comet") and train.run_name == "lamp"
    assert train.lr_scheduler_type == "constant", "without a scheduler the rate stays what it is"
    assert "secret" not in done.stdout and "job_name" in done.stdout
    said = {line.split(": ")[0].removeprefix("# - ") for line in done.stdout.splitlines() if line.startswith("# - ")}
    assert said == {
        *(f"tensorboard.{name}" for name in ("output_path", "job_name")),
        *(f"wandb.{name}" for name in ("project", "team")),
        *(f"comet.{name}" for name in ("samples_log_interval", "api_key")),
    }


def test_every_option_of_a_monitor_has_a_place_in_a_recipe_or_a_remark() -> None:
    options = {
        f"{name}.{option}"
        for name in ("tensorboard", "csv_monitor", "wandb", "comet")
        for option in DeepSpeedConfig.model_fields[name].annotation.model_fields
    }
    taken = {f"{name}.enabled" for name in ("tensorboard", "csv_monitor", "wandb", "comet")}
    assert options == set(_MONITOR_OPTIONS) | taken | {"comet.experiment_name"}


def test_convert_tells_of_no_key_that_the_file_does_not_have(tmp_path: Path) -> None:
    small: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "flops_profiler": {"enabled": True}}
    small["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    paths = [write_config(tmp_path, small), *all_config_files()]
    for path in paths:
        found = interpret(path, own_world_size(path), leave_open=True)
        assert found.settings is not None, found.problems
        text = convert(found.settings, found.reading, model="m", dataset="d", output_dir="o", world_size=None)
        written = set(found.reading.written.values())
        for line in text.splitlines():
            if line.startswith("# - "):
                key = line.removeprefix("# - ").split(": ")[0].split(" on ")[0].split(",")[0]
                assert any(one == key or one.startswith(f"{key}.") for one in written), (path.name, line)


def test_convert_tells_of_keys_that_have_no_effect_beside_others(tmp_path: Path) -> None:
    config: dict[str, Any] = {"train_batch_size": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    config["optimizer"] = {"type": "AdamW", "params": {"adam_w_mode": False, "weight_decay": 0.1}}
    config["optimizer"]["params"]["bias_correction"] = False
    said = run("convert", write_config(tmp_path, config), "--model", "m", "--dataset", "d").stdout
    assert "# - zero_optimization.offload_optimizer.pin_memory: no effect: staging buffers are page-locked" in said
    assert "# - optimizer.params.adam_w_mode: AdamW's decay is decoupled" in said and "cpuadam" not in said
    assert "# - optimizer.params.bias_correction: a recipe's AdamW corrects" in said


def test_convert_of_a_bad_file_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    bad = write_config(tmp_path, {"train_batch_size": 0})
    done = run("convert", bad, "--model", "m", "--dataset", "d", "-o", out)
    assert done.rc == 2 and len(done.errors) == 1 and not out.exists()


def test_as_a_process(run_heavylift: Callable[..., Finished], tmp_path: Path) -> None:
    ended = run_heavylift("config", "explain", write_config(tmp_path, {"fp16": [1], "stage": 3}))
    assert ended.rc == 2 and "Traceback" not in ended.stderr
    assert len(ended.errors) == 3 and all(": " in line for line in ended.errors)


@pytest.mark.parametrize("module", ["heavylift.config.deepspeed.parse", "heavylift.cli.config"])
def test_no_heavy_imports(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=command_env(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
