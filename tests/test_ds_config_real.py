"""Configurations as people post them: each is parsed, explained and converted, or refused for the stated reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ds_configs import (
    FOLDER,
    all_config_files,
    keys_of_note,
    own_world_size,
    raw_config,
    refused_config_files,
    trainer_defaults,
    with_small_batch,
)

from heavylift.config.deepspeed.convert import convert
from heavylift.config.deepspeed.explain import key_table
from heavylift.config.deepspeed.parse import interpret, load_settings
from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.config.recipe import load_recipe
from heavylift.config.schema import Schedule, Tier
from heavylift.errors import UserError

FP16, BF16, FP32 = Precision.FP16, Precision.BF16, Precision.FP32
HOST, DEVICE = Tier.HOST, Tier.DEVICE

# stage, precision, tier, optimizer, scheduler, (train, micro, accumulation) with the world size of `own_world_size`
EXPECTED: dict[str, tuple[int, Precision, Tier, str | None, str | None, tuple[int, int, int]]] = {
    "accelerate_written": (2, BF16, DEVICE, None, None, (8, 4, 1)),
    "alpaca_offload": (3, BF16, HOST, "adamw", "WarmupDecayLR", (16, 2, 2)),
    "axolotl_zero1": (1, BF16, DEVICE, None, None, (16, 2, 2)),
    "axolotl_zero2_offload": (2, BF16, HOST, None, None, (16, 2, 2)),
    "axolotl_zero3_bf16": (3, BF16, DEVICE, None, None, (16, 2, 2)),
    "axolotl_zero3_offload_all": (3, BF16, HOST, None, None, (16, 2, 2)),
    "bf16_masters_autocast": (3, BF16, DEVICE, None, None, (4, 1, 1)),
    "chat_sft": (3, FP16, DEVICE, None, None, (32, 4, 2)),
    "cifar": (0, FP16, DEVICE, "adam", "WarmupLR", (16, 4, 1)),
    "cifar_fp16_masters": (2, FP16, HOST, "adam", "WarmupLR", (4, 1, 1)),
    "commented_hjson_style": (2, BF16, HOST, None, None, (64, 2, 8)),
    "custom_module_zero3": (3, FP16, HOST, "adam", None, (64, 4, 4)),
    "diffusion_zero2": (2, FP16, HOST, None, "WarmupLR", (32, 8, 1)),
    "hf_zero2_offload": (2, FP16, HOST, "adamw", "WarmupLR", (16, 2, 2)),
    "hf_zero3_bf16_decay": (3, BF16, DEVICE, "adamw", "WarmupDecayLR", (16, 2, 2)),
    "hf_zero3_offload": (3, FP16, HOST, "adamw", "WarmupLR", (16, 2, 2)),
    "llamafactory_z0": (0, BF16, DEVICE, None, None, (16, 2, 2)),
    "llamafactory_z2": (2, BF16, DEVICE, None, None, (16, 2, 2)),
    "llamafactory_z2_offload": (2, BF16, HOST, None, None, (16, 2, 2)),
    "llamafactory_z3": (3, BF16, DEVICE, None, None, (16, 2, 2)),
    "llamafactory_z3_offload": (3, BF16, HOST, None, None, (16, 2, 2)),
    "llava_zero3_offload": (3, BF16, HOST, "adamw", "WarmupLR", (16, 2, 2)),
    "megatron_zero2_10b": (2, FP16, HOST, "adam", None, (48, 4, 3)),
    "megatron_zero3_cpu": (3, FP16, HOST, None, None, (64, 16, 1)),
    "moe_leaf_cosine": (3, BF16, DEVICE, "adamw", "WarmupCosineLR", (8, 2, 1)),
    "monitored": (1, BF16, DEVICE, "adamw", "LRRangeTest", (16, 2, 2)),
    "plain_fp32": (0, FP32, DEVICE, "SGD", None, (100, 25, 2)),
    "qanet_onecycle": (0, FP32, DEVICE, "adam", "OneCycle", (512, 32, 4)),
    "superoffload_llama_70b": (3, BF16, HOST, None, None, (16, 4, 1)),
    "zerooffload_llama_70b": (3, BF16, HOST, None, None, (16, 4, 1)),
}

REFUSED = {
    "autotuning": ["autotuning"],
    "bert_max_grad_norm": ["optimizer.params.max_grad_norm"],
    "cosine_with_rates": ["scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"],
    "fp8_block": ["fp8"],
    "monitor_config": ["comms_config", "monitor_config"],
    "onebit_lamb": ["optimizer.type"],
    "sequence_parallel_deepcompile": ["compile", "sequence_parallel_size"],
    "tensor_parallel": ["tensor_parallel"],
    "typing_errors": [
        "gradient_acculation_steps",
        "bf16.enabled",
        "zero_optimization.stage3_param_persitance_threshold",
        "zero_optimization.comm_overlap",
    ],
    "zenflow": ["zero_optimization.zenflow"],
    "zero_infinity": [
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    ],
    "zero_plus_plus": [
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
    ],
}


def _load(path: Path) -> Settings:
    return load_settings(path, own_world_size(path), defaults=trainer_defaults(path))


def test_every_file_has_its_expectation_and_its_line_in_the_readme() -> None:
    assert [path.stem for path in all_config_files()] == sorted(EXPECTED)
    assert [path.stem for path in refused_config_files()] == sorted(REFUSED)
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"[a-z0-9_]+", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    shortened = {f"llamafactory{name}" for name in listed if name.startswith("_z")}
    assert {*EXPECTED, *REFUSED} <= listed | shortened


@pytest.mark.parametrize("path", all_config_files(), ids=lambda path: path.stem)
def test_it_means_what_it_says(path: Path) -> None:
    got = _load(path)
    sizes = (got.batch.train_batch, got.batch.micro_batch, got.batch.accumulation)
    optimizer = got.optimizer.name if got.optimizer is not None else None
    scheduler = got.scheduler.name if got.scheduler is not None else None
    assert (got.stage, got.precision, got.offload.tier, optimizer, scheduler, sizes) == EXPECTED[path.stem]
    assert (got.loss_scale is not None) == (got.precision is FP16)
    if got.offload.tier is HOST:
        assert got.offload.schedule is (Schedule.DEFERRED if got.precision is FP16 else Schedule.AUTO)


@pytest.mark.parametrize("path", all_config_files(), ids=lambda path: path.stem)
def test_every_key_of_it_is_explained(path: Path) -> None:
    found = interpret(path, own_world_size(path), leave_open=True)
    assert found.problems == () and found.settings is not None
    told = [report.path for report in found.reading.reports]
    assert sorted(told) == sorted(_keys(raw_config(path)))
    assert all(report.text for report in found.reading.reports)
    assert key_table(found.reading).row_count == len(told)
    # whatever is without effect is in the notes, once
    silent = [one.path for one in found.reading.reports if one.status == "no effect"]
    for written in silent:
        if raw_value(path, written) != "auto":
            assert sum(written in keys_of_note(note) for note in found.settings.notes) == 1, written


def raw_value(path: Path, written: str) -> Any:
    value: Any = raw_config(path)
    for name in written.split("."):
        value = value[name]
    return value


def _keys(raw: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all values; blocks that are refused as a whole count as one."""
    found = []
    for name, value in raw.items():
        if isinstance(value, dict) and name not in ("hybrid_engine",):
            found += _keys(value, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


@pytest.mark.parametrize("path", all_config_files(), ids=lambda path: path.stem)
def test_its_recipe_loads_and_agrees(path: Path, tmp_path: Path) -> None:
    found = interpret(path, own_world_size(path), defaults=trainer_defaults(path))
    got = found.settings
    assert got is not None
    text = convert(got, found.reading, model="m", dataset="d.jsonl", output_dir="runs/x", world_size=4)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.engine.zero_stage == got.stage and recipe.engine.offload_optimizer is got.offload.tier
    assert recipe.train.max_grad_norm == got.gradient_clipping
    assert recipe.train.per_device_train_batch_size == got.batch.micro_batch
    assert recipe.train.gradient_accumulation_steps == got.batch.accumulation
    if got.optimizer is not None and got.optimizer.name in ("adam", "adamw") and got.scheduler is None:
        assert recipe.train.learning_rate == got.optimizer.lr
        assert recipe.train.weight_decay == got.optimizer.weight_decay
    # each key without effect is in a comment
    comments = [line for line in text.splitlines() if line.startswith("# - ")]
    for report in found.reading.reports:
        if report.status == "no effect" and "auto" not in str(report.value):
            assert any(line.startswith(f"# - {report.path}: ") for line in comments), report


@pytest.mark.parametrize("path", refused_config_files(), ids=lambda path: path.stem)
def test_it_is_refused_key_by_key(path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(path, 2, defaults=trainer_defaults(path))
    assert [problem.split(": ")[1] for problem in caught.value.problems] == REFUSED[path.stem]
    assert all(re.match(rf"{re.escape(str(path))}:\d+: ", problem) for problem in caught.value.problems)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_small_batches_solve_for_any_world_size(world_size: int) -> None:
    for path in all_config_files():
        raw = with_small_batch(raw_config(path))
        batch = load_settings(raw, world_size, defaults=trainer_defaults(path)).batch
        assert batch.micro_batch == 2 and batch.accumulation <= 4
