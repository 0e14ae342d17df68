"""ds_config.json into `Settings`: read, checked, solved, resolved.

Phases: `sources.read_source` -> `reading.read_config` -> `checks.find_conflicts` and `batch.solve_batch` -> `Settings`.
Every problem of a file is collected and raised as one `UserError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heavylift.config.deepspeed.auto import fillings
from heavylift.config.deepspeed.batch import ACCUMULATION, MICRO, TRAIN, solve_batch
from heavylift.config.deepspeed.checks import (
    PRECISIONS,
    find_conflicts,
    optimizer_device,
    optimizer_name,
    place_of,
    precision_of,
    scales_loss,
    scheduler_name,
)
from heavylift.config.deepspeed.notes import combined_notes, folded
from heavylift.config.deepspeed.own_checks import find_own_conflicts, own_schedule, state_format_of
from heavylift.config.deepspeed.places import key_lines, line_of
from heavylift.config.deepspeed.reading import Reading, read_config
from heavylift.config.deepspeed.settings import (
    Autocast,
    BatchSizes,
    CheckpointingSettings,
    FlopsProfilerSettings,
    LossScale,
    MonitorSettings,
    OffloadSettings,
    OptimizerSettings,
    SchedulerSettings,
    Settings,
)
from heavylift.config.deepspeed.sources import read_source
from heavylift.config.deepspeed.training import AdamParams
from heavylift.config.schema import Tier
from heavylift.errors import UserError


@dataclass(frozen=True)
class Interpretation:
    """A file and what it comes to; `settings` is None where there are problems."""

    reading: Reading
    settings: Settings | None
    problems: tuple[str, ...]


def load_settings(
    config: Mapping[str, Any] | str | Path, world_size: int, *, defaults: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of a ds_config: a mapping, the path of a file, or urlsafe base64 of JSON.

    `world_size`: processes of the run, for the batch equation. `defaults`: what a trainer knows for keys that say
    "auto", by the short names of `auto.PLACES` (lr, betas, total_num_steps, ...) or by a key's own path
    (`optimizer.params.lr`); an "auto" that stays open takes heavylift's default, said in `Settings.notes`.

    Raises UserError with one message per problem, `SOURCE: key: what was expected, what came; what to change`. A JSON
    file's has the key's line, `SOURCE:LINE: key: ...`.
    """
    result = interpret(config, world_size, defaults=defaults)
    if result.problems:
        raise UserError(*result.problems)
    assert result.settings is not None
    return result.settings


def interpret(
    config: Mapping[str, Any] | str | Path,
    world_size: int,
    *,
    defaults: Mapping[str, Any] | None = None,
    leave_open: bool = False,
) -> Interpretation:
    """The same with a report on every key, problems returned instead of raised.

    `leave_open`: a required key that says "auto" is no problem: a trainer will fill it in. Raises UserError only where
    the source cannot be read at all.
    """
    assert world_size >= 1, f"{world_size=}"
    source = read_source(config)
    reading = read_config(source.values, source.name, fillings(defaults, source.values))
    problems = reading.problems + find_conflicts(reading, world_size, leave_open)
    problems += find_own_conflicts(reading, leave_open)
    sizes, batch_notes, batch_problem = _batch(reading, world_size)
    if batch_problem is not None and not {TRAIN, MICRO, ACCUMULATION} & reading.bad:
        problems.append((place_of((TRAIN, MICRO, ACCUMULATION), reading), batch_problem))
    lines = key_lines(source.text) if problems and source.text is not None else {}
    placed = [(line_of(place, lines), text) for place, text in problems]
    placed.sort(key=lambda one: one[0] or 0)  # from top to bottom
    messages = tuple(f"{_where(source.name, line)}: {text}" for line, text in placed)
    if messages or sizes is None:
        return Interpretation(reading, None, messages)
    return Interpretation(reading, _resolve(reading, sizes, batch_notes), ())


def _where(name: str, line: int | None) -> str:
    return name if line is None else f"{name}:{line}"


def _batch(reading: Reading, world_size: int) -> tuple[BatchSizes | None, list[str], str | None]:
    """Sizes, a note for each that was an open "auto", and what is wrong."""
    config = reading.config
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if train is None and micro is None and {TRAIN, MICRO} & reading.open_autos:
        micro = 1
    sizes, problem = solve_batch(train, micro, config.gradient_accumulation_steps, world_size)
    if sizes is None:
        return None, [], problem
    values = {TRAIN: sizes.train_batch, MICRO: sizes.micro_batch, ACCUMULATION: sizes.accumulation}
    notes = [
        f'{key}: "auto" that nobody filled in: {value}' for key, value in values.items() if key in reading.open_autos
    ]
    return sizes, notes, None


def _resolve(reading: Reading, sizes: BatchSizes, batch_notes: list[str]) -> Settings:
    config = reading.config
    autocast = None
    if config.torch_autocast.enabled:
        # as the parameters are, where they are 16 bits wide
        default = "float16" if config.fp16.enabled else "bfloat16"
        autocast = Autocast(PRECISIONS[config.torch_autocast.dtype or default])
    buffer_dtype = config.data_types.buffer_dtype
    return Settings(
        batch=sizes,
        precision=precision_of(reading),
        loss_scale=_loss_scale(config.fp16) if scales_loss(reading) else None,
        autocast=autocast,
        cast_inputs=config.fp16.enabled and config.fp16.auto_cast,
        skip_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        stage=config.zero_optimization.stage,
        optimizer=_optimizer(reading),
        scheduler=_scheduler(reading),
        offload=_offload(reading),
        state_format=state_format_of(reading),
        gradient_clipping=config.gradient_clipping,
        managed_accumulation=config.managed_gradient_accumulation,
        dataloader_drop_last=config.dataloader_drop_last,
        checkpointing=_checkpointing(config.activation_checkpointing),
        monitors=_monitors(config),
        steps_per_print=config.steps_per_print,
        # as in DeepSpeed: the profile tells of the step's phases too
        wall_clock_breakdown=config.wall_clock_breakdown or config.flops_profiler.enabled,
        memory_breakdown=config.memory_breakdown,
        dump_state=config.dump_state,
        flops_profiler=_flops_profiler(config.flops_profiler),
        gather_16bit_weights_on_save=config.zero_optimization.gather_16bit_weights_on_model_save,
        buffer_dtype=PRECISIONS[buffer_dtype] if buffer_dtype is not None else None,
        notes=folded([*reading.notes, *batch_notes, *combined_notes(reading)]),
    )


def _loss_scale(fp16: Any) -> LossScale:
    return LossScale(
        static_scale=fp16.loss_scale or None,
        initial_scale=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )


def _optimizer(reading: Reading) -> OptimizerSettings | None:
    type_name = reading.config.optimizer.type
    if type_name is None:
        return None
    name = optimizer_name(type_name)
    assert name is not None, type_name
    params = reading.params.get("optimizer")
    if not isinstance(params, AdamParams):
        assert params is not None, type_name
        return OptimizerSettings(name=name, more=params.model_dump(exclude_unset=True))
    return OptimizerSettings(
        name=name,
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
        weight_decay=params.weight_decay,
        # whether anything decays is known once there are parameter groups, which have decays of their own
        decoupled=name == "adamw" or params.adam_w_mode,
        bias_correction=params.bias_correction,
    )


def _scheduler(reading: Reading) -> SchedulerSettings | None:
    type_name = reading.config.scheduler.type
    if type_name is None:
        return None
    name = scheduler_name(type_name)
    assert name is not None, type_name
    return SchedulerSettings(name, reading.params["scheduler"].model_dump(exclude_unset=True))


def _offload(reading: Reading) -> OffloadSettings:
    block = reading.config.zero_optimization.offload_optimizer
    if optimizer_device(reading) == "none":
        return OffloadSettings(cores_perc=block.cpuadam_cores_perc)
    return OffloadSettings(
        tier=Tier.HOST,
        ratio=block.ratio,
        schedule=own_schedule(reading),
        gradients_on=Tier(reading.config.heavylift.gradients_on),
        streamed_share=reading.config.heavylift.streamed_share,
        cores_perc=block.cpuadam_cores_perc,
    )


def _checkpointing(block: Any) -> CheckpointingSettings:
    asks = any(value not in (False, None) for value in block.model_dump().values())
    return CheckpointingSettings(asks, block.cpu_checkpointing, block.number_checkpoints)


def _monitors(config: Any) -> tuple[MonitorSettings, ...]:
    blocks = {
        "tensorboard": config.tensorboard,
        "csv": config.csv_monitor,
        "wandb": config.wandb,
        "comet": config.comet,
    }
    return tuple(
        MonitorSettings(kind, block.model_dump(exclude={"enabled"})) for kind, block in blocks.items() if block.enabled
    )


def _flops_profiler(block: Any) -> FlopsProfilerSettings:
    values = block.model_dump()
    output_file = values.pop("output_file")
    return FlopsProfilerSettings(**values, output_file=Path(output_file) if output_file else None)
