"""The optimizer, scheduler, activation checkpointing, monitor and profiler blocks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from heavylift.config.deepspeed.keys import Block, Number, Switch, Whole, done, no_effect, refused

Beta = Annotated[Number, Field(ge=0, lt=1)]


class AdamParams(Block):
    """`optimizer.params` of Adam and AdamW."""

    lr: Annotated[Number, Field(ge=0), done("Learning rate.")] = 1e-3
    betas: Annotated[tuple[Beta, Beta], done("Decay of the two moments.")] = (0.9, 0.999)
    eps: Annotated[Number, Field(ge=0), done("Added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0), done("Decoupled (AdamW) unless `adam_w_mode` is false.")] = 0.0
    adam_w_mode: Annotated[
        Switch, done("With type Adam: false adds the decay to the gradient (L2), which needs states on the device.")
    ] = True
    bias_correction: Annotated[
        Switch, done("False: the moments are used as they are, as BERT was trained; needs decoupled decay.")
    ] = True
    amsgrad: Annotated[Switch, refused("remove it, as in DeepSpeed")] = False
    torch_adam: Annotated[Switch, no_effect("the step equals torch.optim.AdamW's", agrees=(False,))] = False
    fp32_optimizer_states: Annotated[
        Switch,
        no_effect("heavylift.state_format and bf16.bf16_optimizer_states say how moments are stored", agrees=(True,)),
    ] = True
    max_grad_norm: Annotated[Number, refused("use the top-level key gradient_clipping", agrees=())] = 0.0


NO_CORRECTION_WITH_L2 = (
    "optimizer.params.bias_correction: false is there with decoupled weight decay only; remove it, or set adam_w_mode "
    "to true"
)
"""Why `adam_w_mode` and `bias_correction` are not both false where something decays."""


class Optimizer(Block):
    """Which optimizer is built, unless the script passes its own."""

    type: Annotated[
        str | None,
        done(
            "Adam or AdamW in any case (both are AdamW unless `adam_w_mode: false`; on any tier), or a class of "
            "torch.optim, such as SGD (states on the device).",
            there="none",
            auto=False,
        ),
    ] = None
    params: Annotated[dict[str, Any], done("Its arguments; with a class of torch.optim, that class's.", there="{}")] = (
        Field(default_factory=dict)
    )
    legacy_fusion: Annotated[Switch, no_effect("there is one kernel for each device", agrees=(False,))] = False


OURS = {"adam": "adam", "adamw": "adamw"}
REFUSED_OPTIMIZERS = {
    "lamb": "use AdamW",
    "lion": "use AdamW",
    "muon": "use AdamW: Muon needs whole matrices, and parameters are sharded",
    "adafactor": "use AdamW: Adafactor needs means over whole matrices, and parameters are sharded",
    "rprop": "use SGD or AdamW: Rprop is for whole data sets, and its step does not take sharded parameters",
    "onebitadam": "use AdamW: gradients are not compressed",
    "zerooneadam": "use AdamW: gradients are not compressed",
    "onebitlamb": "use AdamW: gradients are not compressed",
    "muadam": "use Adam, with muP's learning rates in parameter groups",
    "muadamw": "use AdamW, with muP's learning rates in parameter groups",
    "musgd": "use SGD, with muP's learning rates in parameter groups",
    "lbfgs": "use AdamW: LBFGS needs a closure",
    "sparseadam": "use AdamW: gradients are dense",
    **dict.fromkeys(
        ("adam8bit", "adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"),
        "use AdamW; 8-bit moments are engine.state_format: int8 in a recipe of heavylift train",
    ),
}


_LATE = "as DeepSpeed counts: optimizer steps 1 and 2 both use the first rate"
_BATCH_ITERATION = "Where counting starts; -1: before the first step."
WarmupType = Literal["log", "linear"]


class WarmupLR(Block):
    """`scheduler.params` of WarmupLR: up, then constant."""

    warmup_min_lr: Annotated[Number, Field(ge=0), done("Rate of the first step.")] = 0.0
    warmup_max_lr: Annotated[Number | None, Field(ge=0), done("Rate after it; default: the optimizer's `lr`.")] = None
    warmup_num_steps: Annotated[Whole, Field(ge=0), done(f"Steps of warm-up (at least 2), {_LATE}.")] = 1000
    warmup_type: Annotated[WarmupType, done("Shape of the warm-up.")] = "log"
    last_batch_iteration: Annotated[Whole, Field(ge=-1), done(_BATCH_ITERATION)] = -1


DECAY_MAX_LR = 0.001
"""DeepSpeed's WarmupDecayLR does not look at the optimizer's `lr`."""


class WarmupDecayLR(Block):
    """`scheduler.params` of WarmupDecayLR: up, then linearly to 0."""

    total_num_steps: Annotated[Whole | None, Field(ge=1), done("Optimizer steps until 0; required.")] = None
    warmup_min_lr: Annotated[Number, Field(ge=0), done("Rate of the first step.")] = 0.0
    warmup_max_lr: Annotated[Number, Field(ge=0), done("Highest rate, whatever the optimizer's `lr` is.")] = (
        DECAY_MAX_LR
    )
    warmup_num_steps: Annotated[Whole, Field(ge=0), done(f"Steps of warm-up (at least 2), {_LATE}.")] = 1000
    warmup_type: Annotated[WarmupType, done("Shape of the warm-up.")] = "log"
    last_batch_iteration: Annotated[Whole, Field(ge=-1), done(_BATCH_ITERATION)] = -1


class WarmupCosineLR(Block):
    """`scheduler.params` of WarmupCosineLR: shares of the optimizer's `lr`."""

    total_num_steps: Annotated[Whole | None, Field(ge=1), done("Optimizer steps until the end; required.")] = None
    warmup_min_ratio: Annotated[Number, Field(ge=0), done("Share of the first step.")] = 0.0
    warmup_num_steps: Annotated[Whole, Field(ge=0), done(f"Steps of warm-up (at least 2), {_LATE}.")] = 1000
    cos_min_ratio: Annotated[Number, Field(ge=0), done("Share at the end.")] = 1e-4
    warmup_type: Annotated[WarmupType, done("Shape of the warm-up.")] = "log"
    last_batch_iteration: Annotated[Whole, Field(ge=-1), done(_BATCH_ITERATION)] = -1


class OneCycle(Block):
    """`scheduler.params` of OneCycle."""

    cycle_min_lr: Annotated[Number | None, Field(ge=0), done("Lowest rate of the cycle; required.")] = None
    cycle_max_lr: Annotated[Number | None, Field(ge=0), done("Highest rate of the cycle; required.")] = None
    decay_lr_rate: Annotated[Number, Field(ge=0), done("Decay after the cycle.")] = 0.0
    cycle_first_step_size: Annotated[Whole, Field(ge=1), done("Steps upwards.")] = 2000
    cycle_second_step_size: Annotated[Whole | None, Field(ge=1), done("Steps downwards; default: as upwards.")] = None
    cycle_first_stair_count: Annotated[Whole, Field(ge=0), done("Stairs upwards; 0: smooth.")] = 0
    cycle_second_stair_count: Annotated[Whole | None, Field(ge=0), done("Stairs downwards; default: as upwards.")] = (
        None
    )
    decay_step_size: Annotated[Whole, Field(ge=0), done("Steps per decay; 0: no decay.")] = 0
    cycle_momentum: Annotated[Switch, done("Momentum (the first beta) moves against the rate.")] = True
    cycle_min_mom: Annotated[Beta, done("Lowest momentum.")] = 0.8
    cycle_max_mom: Annotated[Beta, done("Highest momentum.")] = 0.9
    decay_mom_rate: Annotated[Number, Field(ge=0), done("Decay of the momentum after the cycle.")] = 0.0
    last_batch_iteration: Annotated[Whole, Field(ge=-1), done(_BATCH_ITERATION)] = -1


class LRRangeTest(Block):
    """`scheduler.params` of LRRangeTest."""

    lr_range_test_min_lr: Annotated[Number, Field(gt=0), done("First rate.")] = 1e-3
    lr_range_test_step_size: Annotated[Whole, Field(ge=1), done("Steps per raise.")] = 2000
    lr_range_test_step_rate: Annotated[Number, Field(ge=0), done("How much each raise adds, as a share.")] = 1.0
    lr_range_test_staircase: Annotated[Switch, done("Raise in stairs instead of smoothly.")] = False
    last_batch_iteration: Annotated[Whole, Field(ge=-1), done(_BATCH_ITERATION)] = -1


SCHEDULERS: dict[str, type[Block]] = {
    block.__name__: block for block in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
REQUIRED_PARAMS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


class Scheduler(Block):
    """Which learning-rate scheduler is built, unless the script passes its own. Stepped once per optimizer step."""

    type: Annotated[str | None, done(f"One of {', '.join(SCHEDULERS)}.", there="none", auto=False)] = None
    params: Annotated[dict[str, Any], done("Its arguments.", there="{}")] = Field(default_factory=dict)


def _false_is_none(value: Any) -> Any:
    # seen in public files: `"number_checkpoints": false`
    return None if value is False else value


class ActivationCheckpointing(Block):
    """Recomputing activations in backward. A block that asks for anything makes Hugging Face models recompute layer by
    layer; other models call `checkpointing.checkpoint` themselves."""

    cpu_checkpointing: Annotated[Switch, done("The inputs of recomputed layers are kept in host memory.")] = False
    number_checkpoints: Annotated[
        Annotated[Whole, Field(ge=1)] | None,
        BeforeValidator(_false_is_none),
        done("How many layers are recomputed; default: every one.", there="null"),
    ] = None
    partition_activations: Annotated[
        Switch, no_effect("there is no tensor parallelism to divide activations over", agrees=(False,))
    ] = False
    contiguous_memory_optimization: Annotated[
        Switch, no_effect("PyTorch's allocator places activations", agrees=(False,))
    ] = False
    synchronize_checkpoint_boundary: Annotated[Switch, no_effect("nothing needs it", agrees=(False,))] = False
    profile: Annotated[Switch, no_effect("use flops_profiler or wall_clock_breakdown", agrees=(False,))] = False


class Tensorboard(Block):
    """Curves as TensorBoard events."""

    switch: ClassVar[str | None] = "enabled"
    enabled: Annotated[Switch, done("Write them.")] = False
    output_path: Annotated[str | None, done("Folder.", there='""')] = ""
    job_name: Annotated[str, done("Folder inside it.")] = "DeepSpeedJobName"


class CsvMonitor(Block):
    """Curves as CSV files."""

    switch: ClassVar[str | None] = "enabled"
    enabled: Annotated[Switch, done("Write them.")] = False
    output_path: Annotated[str | None, done("Folder.", there='""')] = ""
    job_name: Annotated[str, done("Folder inside it.")] = "DeepSpeedJobName"


class Wandb(Block):
    """Curves for Weights & Biases."""

    switch: ClassVar[str | None] = "enabled"
    enabled: Annotated[Switch, done("Send them.")] = False
    group: Annotated[str | None, done("Group of runs.")] = None
    team: Annotated[str | None, done("Team (entity).")] = None
    project: Annotated[str, done("Project.")] = "deepspeed"


class Comet(Block):
    """Curves for Comet."""

    switch: ClassVar[str | None] = "enabled"
    enabled: Annotated[Switch, done("Send them.")] = False
    samples_log_interval: Annotated[Whole, Field(ge=1), done("Samples between two points.")] = 100
    project: Annotated[str | None, done("Project.")] = None
    workspace: Annotated[str | None, done("Workspace.")] = None
    api_key: Annotated[str | None, done("Key; better the variable COMET_API_KEY.")] = None
    experiment_name: Annotated[str | None, done("Name of the experiment.")] = None
    experiment_key: Annotated[str | None, done("Key of the experiment.")] = None
    online: Annotated[Switch | None, done("Whether to send or to write a local archive.")] = None
    mode: Annotated[str | None, done("How the experiment is opened: get, create or get_or_create.")] = None


class FlopsProfiler(Block):
    """FLOPs, parameters and time of every module in one step."""

    switch: ClassVar[str | None] = "enabled"
    enabled: Annotated[Switch, done("Profile one step.")] = False
    recompute_fwd_factor: Annotated[
        Number, Field(ge=0, le=1), done("Share of the forward that is computed again in backward.")
    ] = 0.0
    profile_step: Annotated[Whole, Field(ge=1), done("Which step.")] = 1
    module_depth: Annotated[Whole, Field(ge=-1), done("How deep modules are shown; -1: all.")] = -1
    top_modules: Annotated[Whole, Field(ge=1), done("How many modules the summary names.")] = 1
    detailed: Annotated[Switch, done("Print the tree of modules.")] = True
    output_file: Annotated[str | None, done("Print to this file instead of the screen.")] = None
