"""Every key of ds_config.json: its types, its names, its status; each mistake is exactly one message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
from ds_configs import keys_of_note

from heavylift.config.deepspeed.keys import Block, Status, block_of, canonical_names, key_of
from heavylift.config.deepspeed.parse import interpret, load_settings
from heavylift.config.deepspeed.schema import DeepSpeedConfig
from heavylift.config.deepspeed.settings import Precision
from heavylift.config.deepspeed.torch_optimizers import TORCH_OPTIMIZERS
from heavylift.config.deepspeed.training import REFUSED_OPTIMIZERS, SCHEDULERS, AdamParams
from heavylift.config.schema import Schedule, Tier
from heavylift.config.words import expected
from heavylift.errors import UserError

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
Path = tuple[str, ...]


def leaves(block: type[Block] = DeepSpeedConfig, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, field) of every key that holds a value."""
    for name, field in block.model_fields.items():
        inner = block_of(field)
        if inner is not None:
            yield from leaves(inner, (*path, name))
        elif name != "params" and not key_of(field).block_keys:
            yield (*path, name), field
    if block is DeepSpeedConfig:
        for kind, params in {"AdamW": AdamParams, **TORCH_OPTIMIZERS, **SCHEDULERS}.items():
            owner = "scheduler" if kind in SCHEDULERS else "optimizer"
            yield from (((owner, kind, name), field) for name, field in params.model_fields.items())


def nested(path: Path, value: Any) -> dict[str, Any]:
    """A config that gives one key a value."""
    config = dict(BASE)
    if path[0] in ("optimizer", "scheduler") and len(path) == 3:
        owner, kind, name = path
        return config | {owner: {"type": kind, "params": {**REQUIRED.get(kind, {}), name: value}}}
    inner: Any = value
    for name in reversed(path[1:]):
        inner = {name: inner}
    return config | {path[0]: inner}


REQUIRED: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},  # nesterov needs it
    "WarmupDecayLR": {"total_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 10},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
}


def written(path: Path) -> str:
    if path[0] in ("optimizer", "scheduler") and len(path) == 3:
        return f"{path[0]}.params.{path[2]}"
    return ".".join(path)


def wrong_values(words: str) -> list[Any]:
    """Values of other types than a key takes."""
    nan, inf = float("nan"), float("inf")
    kinds = {
        "whole number": ["3", True, 1.5, -(10**9), [1]],
        "a number": ["1.0", True, nan, -inf, -1e9, [1.0]],
        "true or false": ["true", 1, 0, [True]],
        "text": [3, True, ["a"]],
        "one of": ["bogus", 7, ["none"]],
        "a list": ["abc", 5],
        "a mapping": ["abc", 5, [1]],
    }
    if "a list" in words:  # whose words name the kind of its items too
        kinds = {"a list": kinds["a list"]}
    found = [value for kind, values in kinds.items() if kind in words for value in values]
    assert found, f"no wrong values for {words}"
    return found if "a mapping" in words else [*found, {"a": 1}]


def problems(config: Any, world_size: int = 1) -> tuple[str, ...]:
    try:
        load_settings(config, world_size)
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("path", "field"), [pytest.param(p, f, id=written(p)) for p, f in leaves()])
def test_a_wrong_type_is_one_message(path: Path, field: Any) -> None:
    for value in wrong_values(expected(field)):
        said = problems(nested(path, value))
        assert len(said) == 1, (value, said)
        assert said[0].startswith(f"ds_config: {written(path)}: "), (value, said)
        assert "\n" not in said[0]


@pytest.mark.parametrize(("path", "field"), [pytest.param(p, f, id=written(p)) for p, f in leaves()])
def test_defaults_given_are_accepted(path: Path, field: Any) -> None:
    value = field.get_default(call_default_factory=True)
    needed = {"train_micro_batch_size_per_gpu", *(f"scheduler.params.{k}" for keys in REQUIRED.values() for k in keys)}
    # any number is refused in the second place
    if written(path) not in needed | {"optimizer.params.max_grad_norm"}:
        assert problems(nested(path, list(value) if isinstance(value, tuple) else value)) == ()


@pytest.mark.parametrize(
    ("path", "field"), [pytest.param(p, f, id=written(p)) for p, f in leaves() if key_of(f).status is Status.NO_EFFECT]
)
def test_a_key_without_effect_is_said_once(path: Path, field: Any) -> None:
    samples = {
        "true or false": [True, False],
        "whole number": [1],
        "a number": [7.0],
        "a list": [["x"]],
        "one of": ["fp16", "cpu", "Fail"],
        "text": ["x"],
        "a mapping": [{"a": 1}],
    }
    words = expected(field)
    listed = next(values for kind, values in samples.items() if kind in words)
    telling = [value for value in listed if not key_of(field).agrees_with(value) and not problems(_on(path, value))]
    # a key whose every value is what happens anyway has nothing to tell
    assert telling or key_of(field).agrees_with(True) and key_of(field).agrees_with(False)
    for value in telling:
        notes = load_settings(_on(path, value), 1).notes
        mine = [note for note in notes if written(path) in keys_of_note(note)]
        assert len(mine) == 1 and "no effect: " in mine[0], notes


def _on(path: Path, value: Any) -> dict[str, Any]:
    """A config that gives one key a value, its block switched on: one that is off says nothing."""
    config = nested(path, value)
    if path[0] == "zero_optimization":
        config["zero_optimization"]["stage"] = 3
        if path[1] in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][path[1]].setdefault("device", "cpu")
    elif path[0] in ("fp16", "bf16", "comms_logger", "torch_autocast"):
        config[path[0]].setdefault("enabled", True)
    return config


NEEDED_BESIDE: dict[str, dict[str, Any]] = {
    "optimizer.params.adam_w_mode": {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}},
}
"""What a key needs so that it makes a difference."""
SAID_TO_CHANGE_NOTHING = {
    "data_types.param_dtype",  # must agree with fp16 and bf16
    "gradient_allreduce_op",  # its other value is refused
    "zero_optimization.cpu_offload_params",  # as offload_param, which has no effect
}
"""Their text says so."""


@pytest.mark.parametrize(
    ("path", "field"), [pytest.param(p, f, id=written(p)) for p, f in leaves() if key_of(f).status is Status.DONE]
)
def test_a_key_that_is_done_arrives(path: Path, field: Any) -> None:
    """Not all values that a key takes come to the same settings."""
    default = field.get_default(call_default_factory=True)
    samples = [default, not default, 0, 0.1, 0.25, 3, 4, "x", [0.5, 0.6], *_choices(field.annotation)]
    samples += {("optimizer", "type"): ["SGD", "AdamW"], ("scheduler", "type"): ["WarmupLR", "LRRangeTest"]}.get(
        path, []
    )
    configs = [_alone(path, list(one) if isinstance(one, tuple) else one) for one in samples]
    found = [replace(load_settings(config, 1), notes=()) for config in configs if not problems(config)]
    assert any(one != found[0] for one in found) is (written(path) not in SAID_TO_CHANGE_NOTHING)


def _choices(annotation: Any) -> list[Any]:
    inner = [one for part in get_args(annotation) for one in _choices(part)]
    return [*get_args(annotation)] if get_origin(annotation) is Literal else inner


def _alone(path: Path, value: Any) -> dict[str, Any]:
    """A config in which one key decides: its blocks are switched on, and no other key has the last word."""
    config = nested(path, value)
    if path == ("train_batch_size",):
        del config["train_micro_batch_size_per_gpu"]
    given, block = config, DeepSpeedConfig
    for name in path[:-1] if len(path) < 3 or path[0] not in ("optimizer", "scheduler") else ():
        given, block = given[name], block_of(block.model_fields[name])
        if block.switch is not None:
            given.setdefault(block.switch, "cpu" if block.switch == "device" else True)
    if path[0] == "heavylift":
        config |= {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    if "zero_optimization" in config:
        config["zero_optimization"].setdefault("stage", 3)
    return _merged(config, NEEDED_BESIDE.get(written(path), {}))


def _merged(first: Any, second: Any) -> Any:
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return first | {key: _merged(first.get(key), value) for key, value in second.items()}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        ({"stage": 3}, "stage: unknown key; did you mean zero_optimization.stage?"),
        ({"lr": 3}, "lr: unknown key; did you mean optimizer.params.lr?"),
        ({"fp16.enabled": True}, "fp16.enabled: unknown key; write enabled inside of the block fp16"),
        ({"bf16": {"enable": True}}, "bf16.enable: unknown key; did you mean bf16.enabled?"),
        ({"bf16": {"loss_scale": 0}}, "bf16.loss_scale: unknown key; did you mean fp16.loss_scale?"),
        (
            {"zero_optimization": {"ratio": 0.5}},
            "zero_optimization.ratio: unknown key; did you mean zero_optimization.offload_optimizer.ratio?",
        ),
        (
            {"zero_optimization": {"comm_overlap": True}},
            "zero_optimization.comm_overlap: unknown key; did you mean zero_optimization.overlap_comm?",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_dekay": 1}}},
            "optimizer.params.weight_dekay: unknown key; did you mean optimizer.params.weight_decay?",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1}}},
            "scheduler.params.total_num_steps: WarmupLR does not have it (WarmupDecayLR does)",
        ),
        ({"aio": {"qd": 1}}, "aio.qd: unknown key; remove it (known: block_size"),
        ({"progressive_layer_drop": {"enabled": False, "teta": 1}}, "progressive_layer_drop.teta: unknown key; did"),
        ({"quux": 1}, "quux: unknown key; remove it (known: docs/deepspeed_config.md)"),
        ({3: 1}, "3: expected a name before the colon"),
        ({"a\nb" * 40: 1}, "'a\\nb"),
    ],
)
def test_unknown_keys(config: dict[Any, Any], said: str) -> None:
    found = problems(BASE | config)
    assert len(found) == 1 and found[0].startswith(f"ds_config: {said}"), found
    assert "\n" not in found[0]


def test_dotted_keys_that_libraries_write_beside_a_block() -> None:
    """TRL's, for a model that is not trained. What a key with an effect would do there is a mistake, not a note."""
    sizes = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 80, "stage3_prefetch_bucket_size": 57}
    dotted = {f"zero_optimization.{name}": size for name, size in sizes.items()}
    notes = load_settings(BASE | {"zero_optimization": {"stage": 3}, **dotted}, 1).notes
    inside = load_settings(BASE | {"zero_optimization": {"stage": 3, **sizes}}, 1).notes
    assert notes == inside and len(notes) > 0


def test_keys_that_are_comments() -> None:
    config = BASE | {"_comment": 1, "//": "x", "comment": [], "bf16": {"enabled": True, "#why": 3}}
    assert load_settings(config, 1).precision is Precision.BF16


def test_every_name_of_a_key_means_it() -> None:
    for path, field in leaves():
        for alias in key_of(field).aliases:
            block: type[Block] = DeepSpeedConfig
            for name in path[:-1]:
                inner = block_of(block.model_fields[name])
                assert inner is not None
                block = inner
            assert canonical_names(block)[alias] == path[-1]
            default = field.get_default(call_default_factory=True)
            assert problems(nested((*path[:-1], alias), default)) == ()
            twice = nested(path, default)
            target = twice
            for name in path[:-1]:
                target = target[name]
            target[alias] = default
            assert "remove one" in problems(twice)[0]


def test_old_shapes() -> None:
    assert load_settings(BASE | {"zero_optimization": True}, 1).stage == 1
    assert load_settings(BASE | {"zero_optimization": False}, 1).stage == 0
    assert load_settings(BASE | {"bfloat16": {"enabled": True}}, 1).precision is Precision.BF16
    old = load_settings(BASE | {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}, 1)
    assert old.offload.tier is Tier.HOST
    assert [note.split(":")[0] for note in old.notes] == [
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_params",
    ]


def test_a_switched_off_block_says_nothing() -> None:
    config = BASE | {
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": True, "loss_scale": 128},
        "zero_optimization": {"offload_param": {"device": "none", "buffer_count": 9}},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "comms_logger": {"enabled": False, "verbose": True},
    }
    settings = load_settings(config, 1)
    assert settings.notes == () and settings.loss_scale is None


def test_whole_numbers_as_people_write_them() -> None:
    import numpy as np

    config = {"train_batch_size": 16.0, "train_micro_batch_size_per_gpu": np.int64(4), "steps_per_print": 1e5}
    config["zero_optimization"] = {"reduce_bucket_size": 5e8}
    settings = load_settings(config, 2)
    assert (settings.batch.train_batch, settings.batch.accumulation, settings.steps_per_print) == (16, 2, 100_000)
    assert type(settings.batch.micro_batch) is int
    for never in (0, float("inf"), None):
        assert load_settings(BASE | {"steps_per_print": never}, 1).steps_per_print is None


def test_null_blocks_are_as_if_absent() -> None:
    assert load_settings(BASE | {"fp16": None, "optimizer": None, "zero_optimization": {"zenflow": None}}, 1)
    for block in ("fp16", "optimizer", "aio", "elasticity"):
        assert problems(BASE | {block: [1]}) == (
            f"ds_config: {block}: expected a mapping, got [1]; change it to {{...}}",
        )


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"amp": {"enabled": True}}, "bf16.enabled"),
        ({"tensor_parallel": {"autotp_size": 4}}, "stage 3"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "stage 3"),
        ({"expert_parallel": {"enabled": True}}, "stage 3"),
        ({"pipeline": {"stages": 2}}, "stage 3"),
        ({"compile": {"deepcompile": True}}, "engine.compile()"),
        ({"elasticity": {"enabled": True}}, "batch keys"),
        ({"autotuning": {"enabled": True}}, "heavylift config explain"),
        ({"data_efficiency": {"data_sampling": {"enabled": True}}}, "data loader"),
        ({"curriculum_learning": {"enabled": True}}, "data loader"),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, "after training"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "offload_optimizer.device cpu"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "remove it"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "remove it"),
        ({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}, "remove it"),
        ({"zero_optimization": {"legacy_stage1": True}}, "remove it"),
        ({"sequence_parallel_size": 2}, "activation_checkpointing"),
        ({"checkpoint": {"use_node_local_storage": True}}, "storage that all nodes share"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "remove it"),
        *(({"optimizer": {"type": name}}, instead) for name, instead in REFUSED_OPTIMIZERS.items()),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_use(config: dict[str, Any], instead: str) -> None:
    found = problems(BASE | config)
    assert len(found) == 1, found
    assert "heavylift does not have" in found[0] and instead in found[0]


def test_features_that_are_off_are_not_refused() -> None:
    off = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
        "pipeline": {"stages": "auto"},
        "compile": {"deepcompile": False},
        "elasticity": {"enabled": False},
        "sequence_parallel_size": 1,
        "zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 1, "zero_quantized_weights": False},
        "optimizer": {"type": "Adam", "params": {"amsgrad": False, "bias_correction": True}},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    }
    assert load_settings(BASE | off, 1).notes == ()
    # an older DeepSpeed's compile block asks for torch.compile: said, not done
    noted = load_settings(BASE | {"compile": {"backend": "inductor"}}, 1).notes
    assert len(noted) == 1 and "engine.compile()" in noted[0]


def test_defaults_are_the_safe_ones() -> None:
    settings = load_settings(BASE, 1)
    assert settings.gradient_clipping == 1.0 and settings.skip_nonfinite
    assert (settings.stage, settings.offload.tier, settings.precision) == (0, Tier.DEVICE, Precision.FP32)
    assert settings.optimizer is None and settings.scheduler is None and settings.monitors == ()


def test_everything_arrives() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.3,
        "managed_gradient_accumulation": False,
        "steps_per_print": 7,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "dataloader_drop_last": True,
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": 8,
            "loss_scale_window": 50,
            "hysteresis": 3,
            "consecutive_hysteresis": True,
            "min_loss_scale": 0.5,
        },
        "data_types": {"buffer_dtype": "fp32", "param_dtype": "fp16"},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "ratio": 0.25, "cpuadam_cores_perc": 0.5},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdAm", "params": {"lr": 1, "betas": [0.5, 0.75], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "warmupLR", "params": {"warmup_max_lr": 0.5, "warmup_type": "linear"}},
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4},
        "tensorboard": {"enabled": True, "output_path": "logs"},
        "csv_monitor": {"enabled": True},
        "wandb": {"enabled": True, "team": "t"},
        "comet": {"enabled": True, "project": "p"},
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": "flops.txt", "top_modules": 3},
    }
    got = load_settings(config, 4)
    assert (got.batch.train_batch, got.batch.micro_batch, got.batch.accumulation) == (24, 2, 3)
    assert got.gradient_clipping == 0.3 and not got.managed_accumulation and got.steps_per_print == 7
    assert got.wall_clock_breakdown and got.memory_breakdown and got.dump_state and got.dataloader_drop_last
    assert got.precision is Precision.FP16 and got.cast_inputs and got.buffer_dtype is Precision.FP32
    scale = got.loss_scale
    assert scale is not None and scale.static_scale is None and scale.initial_scale == 256.0
    assert (scale.window, scale.hysteresis, scale.consecutive_hysteresis, scale.min_scale) == (50, 3, True, 0.5)
    assert (got.stage, got.offload.tier, got.offload.ratio, got.offload.cores_perc) == (2, Tier.HOST, 0.25, 0.5)
    assert got.gather_16bit_weights_on_save
    adam = got.optimizer
    assert adam is not None and (adam.name, adam.lr, adam.betas, adam.eps) == ("adam", 1.0, (0.5, 0.75), 1e-6)
    assert adam.weight_decay == 0.1 and adam.decoupled and adam.more == {}
    assert got.scheduler is not None and got.scheduler.name == "WarmupLR"
    assert got.scheduler.params == {"warmup_max_lr": 0.5, "warmup_type": "linear"}
    assert (
        got.checkpointing.enabled and got.checkpointing.cpu_checkpointing and got.checkpointing.number_checkpoints == 4
    )
    assert {monitor.kind: monitor.options for monitor in got.monitors} == {
        "tensorboard": {"output_path": "logs", "job_name": "DeepSpeedJobName"},
        "csv": {"output_path": "", "job_name": "DeepSpeedJobName"},
        "wandb": {"group": None, "team": "t", "project": "deepspeed"},
        "comet": {
            "samples_log_interval": 100,
            "project": "p",
            "workspace": None,
            "api_key": None,
            "experiment_name": None,
            "experiment_key": None,
            "online": None,
            "mode": None,
        },
    }
    flops = got.flops_profiler
    assert (flops.enabled, flops.profile_step, flops.top_modules, str(flops.output_file)) == (True, 5, 3, "flops.txt")


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        ({"bf16": {"enabled": True}}, Schedule.AUTO),
        ({}, Schedule.AUTO),
        ({"fp16": {"enabled": True}}, Schedule.DEFERRED),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, Schedule.DEFERRED),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, Schedule.DEFERRED),
        ({"torch_autocast": {"enabled": True}}, Schedule.AUTO),
    ],
)
def test_schedule_is_exact_on_overflow(config: dict[str, Any], schedule: Schedule) -> None:
    for super_offload in (True, False):
        device = {"device": "cpu", "super_offload": super_offload}
        zero = {"zero_optimization": {"stage": 1, "offload_optimizer": device}}
        assert load_settings(BASE | config | zero, 1).offload.schedule is schedule


def test_all_problems_at_once_with_the_source() -> None:
    config = {
        "train_batch_size": "8",
        "gradient_clipping": -1,
        "fp16": {"enabled": "true"},
        "zero_optimization": {"stage": "3", "offload_optimizer": {"device": "cpu"}},
        "bogus": 1,
        "compile": {"deepcompile": True},
    }
    found = problems(config)
    assert sorted(one.split(": ")[1] for one in found) == [
        "bogus",
        "compile",
        "fp16.enabled",
        "gradient_clipping",
        "train_batch_size",
        "zero_optimization.stage",
    ]
    reports = {report.path: report.status for report in interpret(config, 1).reading.reports}
    assert reports["bogus"] == "error" and reports["compile"] == "refused" and reports["gradient_clipping"] == "error"
