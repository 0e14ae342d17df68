"""The typed configuration: parsed once, frozen, passed on as these objects.

Each section is a small frozen model; the docstring under a field is its documentation (the reference in
`docs/config.md` is generated from it). This module checks single values; what needs the file system, a tokenizer
or a model is checked in `heavylift.train.preflight` and where the thing is opened. No torch here: a typo must be
reported in under a second.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from heavylift.config.conflict import Conflict


class Tier(StrEnum):
    """Where a tensor lives. `host` is CPU memory, `device` the accelerator (on a machine without one, the CPU)."""

    DEVICE = "device"
    HOST = "host"


class Schedule(StrEnum):
    """When the optimizer step of the host tier runs. All are exact but for the stated bound of `speculative`."""

    AUTO = "auto"
    """`speculative` while clipping does not strike, `deferred` while it does or gradients are accumulated."""
    SYNCHRONOUS = "synchronous"
    """After backward, before step() returns: the specification."""
    IMMEDIATE = "immediate"
    """During backward, as each gradient arrives. Needs max_grad_norm 0. Bit-equal to synchronous."""
    DEFERRED = "deferred"
    """After backward, in forward order, beside the next forward. Bit-equal to synchronous."""
    SPECULATIVE = "speculative"
    """During backward as if no clipping were needed; corrected where it is. Bit-equal unless clipping strikes."""


class StateFormat(StrEnum):
    """How the optimizer states are stored."""

    FP32 = "fp32"
    """Master and moments in float32: 12 bytes per parameter."""
    SPLIT = "split"
    """The master as the bfloat16 parameter and the 16 bits that complete it: 10 bytes, the same bits."""
    BF16 = "bf16"
    """Moments in bfloat16, rounded stochastically: 8 bytes; close to float32, not equal."""
    INT8 = "int8"
    """Moments as 8-bit codes with a scale per 256 of them, rounded stochastically: 6.03 bytes; less close."""

    @property
    def is_exact(self) -> bool:
        """Whether results are those of float32 states to the bit; else moments are rounded."""
        return self not in (StateFormat.BF16, StateFormat.INT8)


def tier_synonyms(value: Any) -> Any:
    """DeepSpeed's words for the same two places, `none` and `cpu`: people paste them. Other values stay as they are."""
    return {"none": "device", "cpu": "host"}.get(value, value) if isinstance(value, str) else value


def _no_bool(value: Any) -> Any:
    # bool is an int in Python; `max_steps: yes` must not become 1
    if isinstance(value, bool):
        raise ValueError("expected a number, got a true/false value")
    return value


def _expand_user(value: Any) -> Any:
    # a shell does not expand `~` inside key=~/path, and YAML never does
    return os.path.expanduser(value) if isinstance(value, str) else value


def _names(value: Any) -> Any:
    # Hugging Face users write one name, or `none`
    if value is None or value == "none":
        return ()
    return (value,) if isinstance(value, str) else value


PathText = Annotated[str, BeforeValidator(_expand_user)]
Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes in `text`, a number with KB, MB, GB or TB (decimal units). Raises ValueError."""
    number, unit = text.strip()[:-2], text.strip()[-2:].upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"expected a size such as 500MB or 5GB, got {text!r}")
    return size


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, defaults checked too."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(Section):
    """What is trained: a causal language model of Hugging Face's form."""

    model_name_or_path: PathText
    """Folder of a Hugging Face causal language model (config.json + *.safetensors) or a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights; `random` needs only config.json (shapes for benchmarks and tests)."""
    tokenizer_name_or_path: PathText | None = None
    """Folder or hub id of the tokenizer; default: the model's own."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the parameters in forward and backward. `auto`: bfloat16 on a GPU, float32 on a CPU.
    Masters are float32 always, moments as `engine.state_format` says."""
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention code of transformers. `auto`: sdpa (cuDNN or flash kernels on a GPU), or eager where a model
    has no other."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you ask for it."""
    freeze: tuple[str, ...] = ()
    """Glob patterns of parameter names that are not trained, e.g. `model.embed_tokens.*`."""


class DataConfig(Section):
    """What it is trained on."""

    dataset: PathText | tuple[PathText, ...] | None = None
    """JSON-lines file, or a list of them. Not used with `format: random`."""
    format: Literal["auto", "messages", "alpaca", "random"] = "auto"
    """`messages`: {"messages": [{"role", "content"}]}; `alpaca`: instruction/input/output[/system];
    `auto` looks at each row; `random`: token ids drawn at random, for benchmarks (every token is trained)."""
    chat_template: PathText | None = None
    """Path of a Jinja chat template; default: the tokenizer's own."""
    cutoff_len: Annotated[Int, Field(ge=2)] | None = None
    """Longest sample in tokens; default: what the model allows. With `format: random` the length of every sample."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with a sample longer than `cutoff_len`."""
    train_on_inputs: bool = False
    """Train on the prompt too. Default: on the assistant's tokens only."""
    val_size: Annotated[Float, Field(ge=0)] = 0.0
    """Held-out share for evaluation: below 1 a fraction of the samples, from 1 up a number of samples."""
    num_samples: Annotated[Int, Field(ge=1, le=100_000_000)] | None = None
    """With `format: random`: how many samples to draw; else: use only the first N samples."""

    @property
    def files(self) -> tuple[str, ...]:
        """The data files as a tuple, empty for `format: random`."""
        if self.dataset is None:
            return ()
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.format == "random":
            if self.dataset is not None:
                raise Conflict(
                    "format: random draws its own tokens; remove `dataset` or choose another format",
                    "dataset",
                    "format",
                )
            if self.cutoff_len is None or self.num_samples is None:
                needed = ("cutoff_len", "num_samples")
                raise Conflict("format: random needs `cutoff_len` and `num_samples`", "format", *needed)
        elif not self.files:
            raise Conflict(
                "`dataset` is missing; give a JSON-lines file, or `format: random`",
                "dataset",
                "format",
            )
        if 1 < self.val_size and self.val_size != int(self.val_size):
            raise Conflict(f"expected a share below 1 or a whole number of samples, got {self.val_size}", "val_size")
        return self


class TrainConfig(Section):
    """How it is trained: steps, learning rate, memory of activations, and where the results go."""

    output_dir: PathText
    """Run folder: model/, metrics.jsonl, loss.png, config.yaml. Must not exist unless `overwrite_output_dir`."""
    overwrite_output_dir: bool = False
    """Replace an existing run folder."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 42
    """Seed of data order, random weights and random data."""
    per_device_train_batch_size: Annotated[Int, Field(ge=1, le=65536)] = 1
    """Samples per process in one forward and backward (the micro-batch)."""
    per_device_eval_batch_size: Annotated[Int, Field(ge=1, le=65536)] | None = None
    """The same for evaluation; default: as in training."""
    gradient_accumulation_steps: Annotated[Int, Field(ge=1, le=65536)] = 1
    """Micro-batches per optimizer step. Gradients add up in float32."""
    num_train_epochs: Annotated[Float, Field(gt=0, le=1_000_000)] = 1.0
    """Passes over the data; `max_steps` wins where both are given."""
    max_steps: Annotated[Int, Field(ge=1)] | None = None
    """Number of optimizer steps."""
    learning_rate: Annotated[Float, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after warm-up; `wsd`: constant, then linear decay over the last `wsd_decay_ratio` of the steps."""
    warmup_ratio: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of the steps with linearly rising learning rate; excludes `warmup_steps`."""
    warmup_steps: Annotated[Int, Field(ge=0)] = 0
    """Number of such steps."""
    min_lr_ratio: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Lowest learning rate of cosine, linear and wsd, as a share of the peak."""
    wsd_decay_ratio: Annotated[Float, Field(ge=0, le=1)] = 0.1
    """Share of all steps that `wsd` decays over."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.0
    """AdamW's decoupled decay; not applied to parameters with fewer than two dimensions (norms, biases)."""
    adam_beta1: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[Float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    adam_epsilon: Annotated[Float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Annotated[Float, Field(ge=0)] = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    gradient_checkpointing: bool | Literal["full", "selective"] = False
    """Recompute each layer in backward instead of keeping its activations (non-reentrant). `true` or `full`: all of it;
    `selective`: all but the outputs of matmuls and attention, which are kept."""
    checkpoint_every: Annotated[Int, Field(ge=1)] = 1
    """With `gradient_checkpointing`: recompute only every N-th layer, beginning with the first."""
    cpu_checkpointing: bool = False
    """With `gradient_checkpointing`: keep the inputs of the recomputed layers in host memory."""
    loss_chunk_tokens: Literal["auto"] | Annotated[Int, Field(ge=0)] = "auto"
    """Trained tokens whose logits exist at a time. `auto`: as many as have about 256 MiB of float32 logits; whole
    logits for models that change them after the head. 0: whole logits."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each decoder layer. `auto`: on a GPU, and where one cannot be compiled they all run as they are written,
    after a warning."""
    logging_steps: Annotated[Int, Field(ge=1)] = 1
    """Print a step line every N steps (metrics.jsonl has every step)."""
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "csv", "comet"], ...], BeforeValidator(_names)] = ()
    """Where the training curves go beside metrics.jsonl; one name is enough, `none` for nowhere. tensorboard and csv
    write into the run folder."""
    run_name: str | None = None
    """Name of the run in Weights & Biases and Comet; default: the name of the run folder."""
    eval_steps: Annotated[Int, Field(ge=1)] | None = None
    """Evaluate on the held-out share every N steps; it is evaluated before the first and after the last step too."""
    profile: bool = False
    """Record steps 3 to 5 of rank 0 in trace.json, for chrome://tracing or ui.perfetto.dev; these steps are slower."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_ratio and self.warmup_steps:
            raise Conflict("give warmup_ratio or warmup_steps, not both", "warmup_steps", "warmup_ratio")
        if not self.gradient_checkpointing and (self.cpu_checkpointing or self.checkpoint_every != 1):
            key = "cpu_checkpointing" if self.cpu_checkpointing else "checkpoint_every"
            raise Conflict(
                f"{key} says how layers are recomputed, and none is: set gradient_checkpointing to true",
                key,
                "gradient_checkpointing",
            )
        return self

    @property
    def recomputes_everything(self) -> bool:
        """Whether the forward of all layers runs twice, as the usual FLOPs formula for checkpointing has it."""
        return self.gradient_checkpointing in (True, "full") and self.checkpoint_every == 1


class EngineConfig(Section):
    """What is sharded, where the optimizer states live, and when they are stepped."""

    zero_stage: Literal[0, 1, 2, 3] = 3
    """What is sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""
    offload_optimizer: Annotated[Tier, BeforeValidator(tier_synonyms)] = Tier.DEVICE
    """Where the optimizer states live: `device` or `host` (DeepSpeed's `none` and `cpu` are understood)."""
    ratio: Annotated[Float, Field(ge=0, le=1)] | Literal["auto"] = 1.0
    """With `offload_optimizer: host`: share of the optimizer states that goes to the host, to the element. `auto`: what
    the device has no room for."""
    schedule: Schedule = Schedule.AUTO
    """When the step of the host tier runs: `synchronous` after backward; `deferred` beside the next forward;
    `immediate` during backward (only without clipping); `speculative` during backward, corrected when clipping
    strikes; `auto` chooses between the last two and `deferred`."""
    state_format: StateFormat = StateFormat.FP32
    """How optimizer states are stored: `fp32` (12 bytes per parameter); `split` (10 bytes, the same results to the bit;
    needs bfloat16 parameters); `bf16` (8 bytes: moments in bfloat16, rounded stochastically); `int8` (6 bytes: moments
    in 8 bits with a scale per 256)."""
    gradients_on: Annotated[Tier, BeforeValidator(tier_synonyms)] = Tier.HOST
    """Where gradients wait until the CPU steps them: `host`, copied as they come (2 bytes of memory per parameter),
    or `device`, copied as they are stepped (2 bytes of device memory, which activations have left by then)."""
    streamed_share: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of the host's optimizer states that the GPU steps instead of the CPU: they travel over the bus and back,
    while gradients stay on the GPU. The same results to the bit. Not with `state_format: int8`."""
    cpu_threads: Annotated[Int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Threads per process of the CPU optimizer step. `auto`: the allowed cores over the processes of this machine."""
    native_kernel: bool = True
    """Use the compiled CPU kernel; false takes its plain PyTorch twin (slower, the same bits)."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if not self.state_format.is_exact and self.schedule in (Schedule.IMMEDIATE, Schedule.SPECULATIVE):
            raise Conflict(
                f"a step that {self.schedule} has taken too early cannot be taken back with state_format "
                f"{self.state_format}; choose schedule auto, deferred or synchronous",
                "schedule",
                "state_format",
            )
        if self.state_format is StateFormat.INT8 and self.streamed_share > 0:
            raise Conflict(
                f"states in state_format int8 are not streamed, got streamed_share {self.streamed_share:g}; set it to "
                "0, or state_format to fp32, split or bf16",
                "streamed_share",
                "state_format",
            )
        return self

    @property
    def keys_without_effect(self) -> list[str]:
        """Keys given that say how the host tier works, where there is none; those at their defaults not counted."""
        if self.offload_optimizer is Tier.HOST:
            return []
        fields = type(self).model_fields
        names = ("ratio", "schedule", "gradients_on", "streamed_share", "cpu_threads", "native_kernel")
        return [name for name in names if name in self.model_fields_set and getattr(self, name) != fields[name].default]


class EvalConfig(Section):
    """An answer of the model, before and after."""

    sample_prompt: str | None = None
    """A question that the model answers before and after training (small models: one copy is loaded whole)."""
    sample_max_new_tokens: Annotated[Int, Field(ge=1, le=4096)] = 64
    """Length limit of that answer."""


class ExportConfig(Section):
    """The model folder that is written at the end."""

    save: bool = True
    """Write the model folder at the end of the run; false for benchmarks."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the saved weights. Buffers are written no narrower than they are."""
    max_shard_size: str = "5GB"
    """Largest safetensors file, e.g. 500MB, 5GB (decimal units)."""

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes."""
        return parse_size(self.max_shard_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            parse_size(self.max_shard_size)
        except ValueError as error:
            raise Conflict(str(error), "max_shard_size") from None
        return self


class LaunchConfig(Section):
    """The processes of this machine."""

    nproc: Annotated[Int, Field(ge=1)] | Literal["auto"] = "auto"
    """Processes on this machine. `auto`: one per visible GPU; without a GPU 2 (1 on a single core)."""


class Recipe(Section):
    """One run, whole: what `heavylift train` takes and writes back resolved to `config.yaml`."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval.sample_prompt is not None and not self.export.save:
            raise Conflict(
                "the prompt asks the saved model; remove eval.sample_prompt, or set export.save to true",
                "eval.sample_prompt",
                "export.save",
            )
        if self.train.eval_steps is not None and self.data.val_size == 0:
            raise Conflict(
                "nothing is held out to evaluate on; set data.val_size or remove train.eval_steps",
                "train.eval_steps",
                "data.val_size",
            )
        if self.engine.schedule is Schedule.IMMEDIATE and self.train.max_grad_norm > 0:
            raise Conflict(
                "immediate steps are taken before the gradient norm is known; set train.max_grad_norm to 0, or "
                "engine.schedule to speculative, deferred or auto",
                "engine.schedule",
                "train.max_grad_norm",
            )
        if self.engine.state_format is StateFormat.SPLIT and self.model.dtype == "float32":
            # what `auto` is on this machine is known, and checked, when the run starts
            raise Conflict(
                "state_format split needs bfloat16 parameters, which are half of its masters, and model.dtype is "
                "float32; set model.dtype to bfloat16, or engine.state_format to fp32",
                "engine.state_format",
                "model.dtype",
            )
        self._check_host_tier()
        return self

    def _check_host_tier(self) -> None:
        """Somebody who says how the host tier works and forgets to ask for it must hear of it; who asks for the device
        has decided (a recipe for the host with one word changed, to compare), and is told when the run starts."""
        unused = self.engine.keys_without_effect
        if unused and "offload_optimizer" not in self.engine.model_fields_set:
            keys = [f"engine.{name}" for name in unused]
            raise Conflict(
                f"has an effect with engine.offload_optimizer: host only, and that is not set; add it, or remove "
                f"{', '.join(keys)}",
                *keys,
            )

    @property
    def run_name(self) -> str:
        """`train.run_name`, else the last part of `train.output_dir`."""
        return self.train.run_name or self.output_dir.absolute().name

    @property
    def output_dir(self) -> Path:
        """The run folder as a path."""
        return Path(self.train.output_dir)
