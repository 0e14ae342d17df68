"""What a ds_config.json means here: small frozen objects, resolved, that the engine is built from.

`heavylift.config.deepspeed.parse` makes them; nothing after it sees a raw key of the file. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from heavylift.config.schema import Schedule, StateFormat, Tier


class Precision(StrEnum):
    """Dtype of parameters in forward and backward; masters are float32 always."""

    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"


@dataclass(frozen=True)
class BatchSizes:
    """train_batch == micro_batch * accumulation * world_size, always."""

    train_batch: int
    """Rows per optimizer step, all ranks."""
    micro_batch: int
    """Rows per rank in one forward and backward."""
    accumulation: int
    """Micro-batches per optimizer step."""


@dataclass(frozen=True)
class LossScale:
    """How losses in float16 are scaled so that small gradients survive."""

    static_scale: float | None = None
    """A fixed factor; None: dynamic."""
    initial_scale: float = 2.0**16
    window: int = 1000
    """Good steps until the dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows until it halves."""
    consecutive_hysteresis: bool = False
    """Whether a good step gives the hysteresis back."""
    min_scale: float = 1.0
    """An overflow at this scale ends the run."""


@dataclass(frozen=True)
class Autocast:
    """torch.autocast around forward; parameters keep the dtype of `Settings.precision`."""

    dtype: Precision
    """`bfloat16` or `float16`."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The `optimizer` block. `name`: adam, adamw (both ours, on tiers), else a class of torch.optim as torch spells it
    (SGD), whose arguments are all in `more`."""

    name: str
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """AdamW's decay; false: plain Adam's L2 term in the gradient (`adam_w_mode: false`), where anything decays."""
    bias_correction: bool = True
    """False: the moments are used as they are, with decoupled decay only."""
    more: dict[str, Any] = field(default_factory=dict)
    """Other parameters, for classes of torch.optim."""


@dataclass(frozen=True)
class SchedulerSettings:
    """The `scheduler` block."""

    name: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest."""
    params: dict[str, Any]


@dataclass(frozen=True)
class OffloadSettings:
    """Where optimizer states live, and who steps them."""

    tier: Tier = Tier.DEVICE
    ratio: float = 1.0
    schedule: Schedule = Schedule.AUTO
    gradients_on: Tier = Tier.HOST
    """Where gradients wait until the CPU steps them (`heavylift.gradients_on`)."""
    streamed_share: float = 0.0
    """Share of the host's states that the GPU steps (`heavylift.streamed_share`)."""
    cores_perc: float = 0.8
    """Share of the rank's cores that the CPU step may use (`cpuadam_cores_perc`)."""


@dataclass(frozen=True)
class CheckpointingSettings:
    """The `activation_checkpointing` block."""

    enabled: bool = False
    """Whether the file's block asks for anything: HF models are then recomputed layer by layer without being asked."""
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = None


@dataclass(frozen=True)
class MonitorSettings:
    """One sink of training curves."""

    kind: str
    """tensorboard, csv, wandb or comet."""
    options: dict[str, Any]


@dataclass(frozen=True)
class FlopsProfilerSettings:
    """The `flops_profiler` block."""

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: Path | None = None
    recompute_fwd_factor: float = 0.0


@dataclass(frozen=True)
class Settings:
    """All of it."""

    batch: BatchSizes
    precision: Precision = Precision.FP32
    loss_scale: LossScale | None = None
    """With FP16 (or autocast to float16) only."""
    autocast: Autocast | None = None
    cast_inputs: bool = False
    """Float inputs of forward are cast to float16 (`fp16.auto_cast`)."""
    skip_nonfinite: bool = True
    """A step whose gradient norm is not finite leaves weights and states as they are."""
    stage: int = 0
    optimizer: OptimizerSettings | None = None
    scheduler: SchedulerSettings | None = None
    offload: OffloadSettings = OffloadSettings()
    state_format: StateFormat = StateFormat.FP32
    """How AdamW's master and moments are stored, on whatever tier."""
    gradient_clipping: float = 1.0
    """Global norm; 0: no clipping."""
    managed_accumulation: bool = True
    """False: the caller owns the boundary, every step() updates."""
    dataloader_drop_last: bool = False
    checkpointing: CheckpointingSettings = CheckpointingSettings()
    monitors: tuple[MonitorSettings, ...] = ()
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    flops_profiler: FlopsProfilerSettings = FlopsProfilerSettings()
    gather_16bit_weights_on_save: bool = False
    buffer_dtype: Precision | None = None
    """`data_types.buffer_dtype`."""
    notes: tuple[str, ...] = ()
    """One line for every key that was accepted without effect, said once by rank 0."""
