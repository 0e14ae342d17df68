"""A ds_config.json as one of our recipes (YAML): what has a place there is taken over, the rest is listed in comments.

Left out: anything that a ds_config does not know (data, lengths, epochs), which keeps the recipe's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heavylift.config.deepspeed.notes import without_effect
from heavylift.config.deepspeed.own_checks import asked_format, formats_without_effect
from heavylift.config.deepspeed.reading import Reading
from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.config.deepspeed.training import DECAY_MAX_LR
from heavylift.config.recipe import dump_yaml
from heavylift.config.schema import StateFormat, Tier


@dataclass
class _Draft:
    """Sections of the recipe, and what could not be taken over."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def put(self, section: str, **values: Any) -> None:
        self.sections.setdefault(section, {}).update(values)


def convert(
    settings: Settings, reading: Reading, *, model: str, dataset: str, output_dir: str, world_size: int | None
) -> str:
    """The recipe as YAML text that `load_recipe` reads, with a comment on every key that has no place in it.

    `world_size`: the processes of the run where they are known, else the recipe chooses.
    """
    draft = _Draft()
    draft.put("model", model_name_or_path=model)
    draft.put("data", dataset=dataset)
    draft.put("train", output_dir=output_dir)
    _precision(settings, draft)
    _batch(settings, reading, draft)
    _optimizer(settings, reading, draft)
    _scheduler(settings, reading, draft)
    _checkpointing(settings, draft)
    _engine(settings, reading, draft)
    _monitors(settings, reading, draft)
    _rest(settings, reading, draft)
    if world_size is not None:
        draft.put("launch", nproc=world_size)
    body = dump_yaml(draft.sections)
    return _header(reading, draft) + body


def _header(reading: Reading, draft: _Draft) -> str:
    lines = [f"From {Path(reading.source).name} by `heavylift config convert`. Every key: docs/config.md."]
    remarks = [*draft.remarks, *_without_place(reading)]
    if remarks:
        lines += ["", "Not taken over:", *(f"- {remark}" for remark in remarks)]
    return "".join(f"# {' '.join(line.split())}".rstrip() + "\n" for line in lines)


def _without_place(reading: Reading) -> list[str]:
    """Keys without effect, each with why."""
    alone = [f"{one.path}: {one.text}" for one in reading.reports if one.status == "no effect"]
    # whatever the optimizer, a recipe's is AdamW
    taken = formats_without_effect(reading)
    found = {path: why for path, why in without_effect(reading).items() if path not in taken}
    return alone + [f"{reading.written[path]}: {why}" for path, why in found.items()]


def _precision(settings: Settings, draft: _Draft) -> None:
    if settings.precision is Precision.FP16:
        draft.remarks.append("fp16: a recipe trains in bfloat16 on a GPU (no loss scale needed) and float32 on a CPU")
    else:
        draft.put("model", dtype=settings.precision.value)
    if settings.autocast is not None:
        draft.remarks.append("torch_autocast: a recipe's parameters have the dtype of model.dtype")
    if settings.buffer_dtype is not None:
        draft.remarks.append("data_types.buffer_dtype: buffers keep their dtype")


def _batch(settings: Settings, reading: Reading, draft: _Draft) -> None:
    if "train_micro_batch_size_per_gpu" in reading.given or "train_batch_size" in reading.given:
        draft.put("train", per_device_train_batch_size=settings.batch.micro_batch)
    if settings.batch.accumulation > 1:
        draft.put("train", gradient_accumulation_steps=settings.batch.accumulation)
    if not settings.managed_accumulation:
        draft.remarks.append("managed_gradient_accumulation: a recipe's run always manages it")


def _optimizer(settings: Settings, reading: Reading, draft: _Draft) -> None:
    draft.put("train", max_grad_norm=settings.gradient_clipping)
    if not settings.skip_nonfinite:
        draft.remarks.append("bf16.check_grad_overflow: steps that are not finite are always skipped")
    optimizer = settings.optimizer
    if optimizer is None:
        return
    if optimizer.name not in ("adam", "adamw"):
        draft.remarks.append(
            f"optimizer.type: {optimizer.name}; a recipe trains with AdamW, which takes none of optimizer.params; "
            "set train.learning_rate"
        )
        return
    if not optimizer.decoupled and optimizer.weight_decay > 0:
        draft.remarks.append("optimizer.params.adam_w_mode: a recipe's weight decay is decoupled (AdamW)")
    if not optimizer.bias_correction:
        draft.remarks.append("optimizer.params.bias_correction: a recipe's AdamW corrects its moments' bias")
    draft.put("train", learning_rate=optimizer.lr)  # also where it is not given: a recipe's default is another
    if "optimizer.params.lr" in reading.open_autos:
        draft.remarks.append(
            f'optimizer.params.lr: "auto" that nobody filled in: {optimizer.lr:g}; set train.learning_rate'
        )
    for key, name in {"eps": "adam_epsilon", "weight_decay": "weight_decay"}.items():
        if f"optimizer.params.{key}" in reading.given:
            draft.put("train", **{name: getattr(optimizer, key)})
    if "optimizer.params.eps" in reading.given and optimizer.eps == 0:
        del draft.sections["train"]["adam_epsilon"]
        draft.remarks.append("optimizer.params.eps: 0; a recipe needs more than 0")
    if "optimizer.params.betas" in reading.given:
        draft.put("train", adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1])
    if optimizer.weight_decay > 0:
        draft.remarks.append(
            "optimizer.params.weight_decay on norms and biases: a recipe decays matrices only, as the Hugging Face "
            "Trainer does"
        )


_SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _scheduler(settings: Settings, reading: Reading, draft: _Draft) -> None:
    scheduler = settings.scheduler
    if scheduler is None:
        draft.put("train", lr_scheduler_type="constant")  # the rate of an engine without a scheduler never changes
        return
    shape = _SHAPES.get(scheduler.name)
    if shape is None:
        draft.remarks.append(f"scheduler.type: {scheduler.name} has no counterpart; see train.lr_scheduler_type")
        return
    params = scheduler.params
    draft.put("train", lr_scheduler_type=shape)
    if "warmup_num_steps" in params:
        draft.put("train", warmup_steps=params["warmup_num_steps"])
    elif "scheduler.params.warmup_num_steps" not in reading.open_autos:
        draft.put("train", warmup_steps=1000)  # DeepSpeed's default
    if params.get("total_num_steps") is not None:
        draft.put("train", max_steps=params["total_num_steps"])
    high = params.get("warmup_max_lr", DECAY_MAX_LR if scheduler.name == "WarmupDecayLR" else None)
    if high is not None and "scheduler.params.warmup_max_lr" not in reading.open_autos:
        draft.put("train", learning_rate=high)
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        if params.get(key):
            draft.remarks.append(f"scheduler.params.{key}: {params[key]:g}; a recipe's warm-up starts from 0")
    if params.get("last_batch_iteration", -1) >= 0:
        draft.remarks.append("scheduler.params.last_batch_iteration: a recipe's schedule starts at its first step")
    if params.get("cos_min_ratio") is not None:
        draft.put("train", min_lr_ratio=min(params["cos_min_ratio"], 1.0))
    draft.remarks.append(
        "scheduler, step by step: a recipe's warm-up is linear, its first step is above 0 and it starts one step "
        "earlier than DeepSpeed's"
    )


def _checkpointing(settings: Settings, draft: _Draft) -> None:
    block = settings.checkpointing
    if not block.enabled:
        return
    draft.put("train", gradient_checkpointing=True)
    if block.cpu_checkpointing:
        draft.put("train", cpu_checkpointing=True)
    if block.number_checkpoints is not None:
        draft.remarks.append(
            f"activation_checkpointing.number_checkpoints: {block.number_checkpoints}; see train.checkpoint_every, "
            "which counts layers"
        )


def _engine(settings: Settings, reading: Reading, draft: _Draft) -> None:
    draft.put("engine", zero_stage=settings.stage)
    state_format = asked_format(reading)
    if state_format is not StateFormat.FP32:
        draft.put("engine", state_format=state_format.value)
    if state_format is StateFormat.SPLIT:
        draft.put("model", dtype="bfloat16")  # where bf16.enabled is "auto", this is what it must become
    if settings.offload.tier is Tier.HOST:
        draft.put("engine", offload_optimizer="host", ratio=settings.offload.ratio)
        if settings.offload.gradients_on is Tier.DEVICE:
            draft.put("engine", gradients_on="device")
        if settings.offload.streamed_share > 0:
            draft.put("engine", streamed_share=settings.offload.streamed_share)
        schedule = reading.config.heavylift.schedule
        if schedule != "auto":
            draft.put("engine", schedule=schedule)
        cores = "zero_optimization.offload_optimizer.cpuadam_cores_perc"
        if cores in reading.given and settings.offload.cores_perc != 1:
            draft.remarks.append(
                f"{cores}: {settings.offload.cores_perc:g}; see engine.cpu_threads, which counts threads"
            )


_IN_RUN_FOLDER = "the curves go into the run folder, train.output_dir"
_MONITOR_OPTIONS = {
    "tensorboard.output_path": _IN_RUN_FOLDER,
    "tensorboard.job_name": _IN_RUN_FOLDER,
    "csv_monitor.output_path": _IN_RUN_FOLDER,
    "csv_monitor.job_name": _IN_RUN_FOLDER,
    "wandb.project": "set the variable WANDB_PROJECT",
    "wandb.team": "set the variable WANDB_ENTITY",
    "wandb.group": "set the variable WANDB_RUN_GROUP",
    "comet.project": "set the variable COMET_PROJECT_NAME",
    "comet.workspace": "set the variable COMET_WORKSPACE",
    "comet.api_key": "set the variable COMET_API_KEY",
    "comet.experiment_key": "set the variable COMET_EXPERIMENT_KEY",
    "comet.samples_log_interval": "every step is a point",
    "comet.online": "Comet's own configuration says whether it sends",
    "comet.mode": "an experiment is always created",
}
"""Options of monitors without a key in a recipe, and what does instead."""


def _monitors(settings: Settings, reading: Reading, draft: _Draft) -> None:
    if not settings.monitors:
        return
    draft.put("train", report_to=[monitor.kind for monitor in settings.monitors])
    for monitor in settings.monitors:
        block = "csv_monitor" if monitor.kind == "csv" else monitor.kind
        given = [name for name, value in monitor.options.items() if f"{block}.{name}" in reading.given and value]
        if "experiment_name" in given:
            draft.put("train", run_name=monitor.options["experiment_name"])
        draft.remarks += [
            f"{block}.{name}: {_MONITOR_OPTIONS[f'{block}.{name}']}" for name in given if name != "experiment_name"
        ]


def _rest(settings: Settings, reading: Reading, draft: _Draft) -> None:
    if settings.steps_per_print is not None:
        draft.put("train", logging_steps=settings.steps_per_print)
    for is_given, key, instead in (
        (reading.config.wall_clock_breakdown, "wall_clock_breakdown", "metrics.jsonl says where each step's time went"),
        (settings.memory_breakdown, "memory_breakdown", "the start and metrics.jsonl say what memory was used"),
        (settings.flops_profiler.enabled, "flops_profiler", "use train.profile"),
        (settings.dump_state, "dump_state", "the resolved recipe is in the run folder"),
        (settings.dataloader_drop_last, "dataloader_drop_last", "the last, smaller batch of an epoch is trained on"),
    ):
        if is_given:
            draft.remarks.append(f"{key}: {instead}")
