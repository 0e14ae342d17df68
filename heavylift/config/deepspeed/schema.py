"""ds_config.json, whole: every key that DeepSpeed knows, with its type and what it does here (see `keys.py`).

Single values are checked here; what keys mean together is checked in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from heavylift.config.deepspeed.keys import Block, Number, Switch, Whole, done, no_effect, refused
from heavylift.config.deepspeed.own import IGNORED_THERE, Heavylift
from heavylift.config.deepspeed.precision import FP32_NAMES, Bf16, DataTypes, Dtype, Fp16, TorchAutocast
from heavylift.config.deepspeed.refused import REFUSED_BLOCKS, Aio, Checkpoint, CommsLogger, Timers
from heavylift.config.deepspeed.training import (
    ActivationCheckpointing,
    Comet,
    CsvMonitor,
    FlopsProfiler,
    Optimizer,
    Scheduler,
    Tensorboard,
    Wandb,
)
from heavylift.config.deepspeed.zero import ZeroOptimization

_REDUCTION = "gradients are reduced in float32"


def _never(value: Any) -> Any:
    # Accelerate writes infinity, others 0, for "do not print"
    return (
        None if isinstance(value, int | float) and not isinstance(value, bool) and value in (0, float("inf")) else value
    )


# longer than a class should be: the file has these keys side by side
class _Values(Block):
    """Everything but the blocks that are refused as a whole."""

    train_batch_size: Annotated[
        Annotated[Whole, Field(ge=1)] | None, done("Rows per optimizer step, over all ranks.", there="none")
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        Annotated[Whole, Field(ge=1)] | None, done("Rows per rank in one forward and backward.", there="none")
    ] = None
    gradient_accumulation_steps: Annotated[
        Annotated[Whole, Field(ge=1)] | None,
        done("Micro-batches per optimizer step; gradients add up in float32.", there="1"),
    ] = None
    managed_gradient_accumulation: Annotated[
        Switch, done("False: the script decides, every step() updates.", auto=False)
    ] = True
    gradient_clipping: Annotated[
        Number,
        Field(ge=0),
        done("Clip the global gradient norm to this; 0: no clipping.", there="1.0 (0.0 up to 0.19.2)"),
    ] = 1.0
    steps_per_print: Annotated[
        Annotated[Whole, Field(ge=1)] | None,
        BeforeValidator(_never),
        done("Steps between two progress lines; null, 0 or infinity: none.", auto=False),
    ] = None
    wall_clock_breakdown: Annotated[
        Switch, done("Time forward, backward and step; `flops_profiler` turns it on too.", auto=False)
    ] = False
    memory_breakdown: Annotated[Switch, done("Print memory around the step.", auto=False)] = False
    dump_state: Annotated[Switch, done("Print the resolved settings at the start.", auto=False)] = False
    dataloader_drop_last: Annotated[Switch, done("Drop the last, smaller batch of training_data.", auto=False)] = False
    optimizer: Annotated[Optimizer, done("Which optimizer is built.")] = Optimizer()
    scheduler: Annotated[Scheduler, done("Which learning-rate scheduler is built.")] = Scheduler()
    fp16: Annotated[Fp16, done("Training in float16.")] = Fp16()
    bf16: Annotated[Bf16, done("Training in bfloat16.", aliases=("bfloat16",))] = Bf16()
    torch_autocast: Annotated[TorchAutocast, done("PyTorch's autocast.")] = TorchAutocast()
    data_types: Annotated[DataTypes, done("Dtypes of single things.")] = DataTypes()
    zero_optimization: Annotated[ZeroOptimization, done("What is sharded and where it lives.")] = ZeroOptimization()
    heavylift: Annotated[
        Heavylift, done("Formats, streaming and schedule of the optimizer states.", there=IGNORED_THERE)
    ] = Heavylift()
    activation_checkpointing: Annotated[ActivationCheckpointing, done("What is recomputed in backward.")] = (
        ActivationCheckpointing()
    )
    tensorboard: Annotated[Tensorboard, done("Curves for TensorBoard.")] = Tensorboard()
    csv_monitor: Annotated[CsvMonitor, done("Curves as CSV files.")] = CsvMonitor()
    wandb: Annotated[Wandb, done("Curves for Weights & Biases.")] = Wandb()
    comet: Annotated[Comet, done("Curves for Comet.")] = Comet()
    flops_profiler: Annotated[FlopsProfiler, done("FLOPs per module.")] = FlopsProfiler()
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"],
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
        done("Gradients are averaged over the ranks; `sum` is refused.", auto=False),
    ] = "mean"
    communication_data_type: Annotated[
        Dtype | None, no_effect(_REDUCTION, agrees=FP32_NAMES, there="the parameters' dtype")
    ] = None
    seq_parallel_communication_data_type: Annotated[
        Dtype | None, no_effect("there is no sequence parallelism", there="fp32")
    ] = None
    fp32_allreduce: Annotated[Switch, no_effect(_REDUCTION, agrees=(True,), there="false (old)")] = False
    prescale_gradients: Annotated[
        Switch, no_effect(f"{_REDUCTION}, where the order of dividing does not matter", agrees=(False,))
    ] = False
    gradient_predivide_factor: Annotated[
        Number, Field(gt=0), no_effect(f"{_REDUCTION}, where the order of dividing does not matter", agrees=(1.0, 1))
    ] = 1.0
    sparse_gradients: Annotated[Switch, no_effect("embeddings have dense gradients", agrees=(False,))] = False
    disable_allgather: Annotated[Switch, no_effect("parameters are always all-gathered", agrees=(False,))] = False
    sequence_parallel_size: Annotated[
        Whole, Field(ge=1), refused("remove it: use activation_checkpointing for long sequences", agrees=(1,))
    ] = 1
    data_parallel_size: Annotated[
        Annotated[Whole, Field(ge=1)] | None, no_effect("every rank is a data-parallel one", there="all ranks")
    ] = None
    disable_python_gc: Annotated[Switch, no_effect("Python's collector is left as it is", agrees=(False,))] = False
    graph_harvesting: Annotated[Switch, no_effect("use engine.compile(mode='reduce-overhead')", agrees=(False,))] = (
        False
    )
    zero_allow_untested_optimizer: Annotated[Switch, no_effect("no optimizer is refused for being untested")] = False
    zero_force_ds_cpu_optimizer: Annotated[
        Switch, no_effect("with states on the host, Adam and AdamW of torch and DeepSpeed become heavylift's")
    ] = True
    use_data_before_expert_parallelism: Annotated[Switch, no_effect("there is no expert parallelism")] = False
    vocabulary_size: Annotated[
        Annotated[Whole, Field(ge=1)] | None, no_effect("it is only a warning there, too", there="none")
    ] = None
    log_level: Annotated[str | None, no_effect("set the level of Python's logger `heavylift`", there="none")] = None
    aio: Annotated[Aio, no_effect("nothing is kept on NVMe")] = Aio()
    comms_logger: Annotated[CommsLogger, no_effect("collectives show in PyTorch's profiler")] = CommsLogger()
    timers: Annotated[Timers, no_effect("samples per second are always measured")] = Timers()
    checkpoint: Annotated[Checkpoint, no_effect("there is one checkpoint format")] = Checkpoint()


_BLOCK_FIELDS: dict[str, Any] = {
    name: (Annotated[dict[str, Any], key], Field(default_factory=dict)) for name, key in REFUSED_BLOCKS.items()
}
DeepSpeedConfig: type[_Values] = create_model(
    "DeepSpeedConfig", __base__=_Values, __doc__="Top level.", __module__=__name__, **_BLOCK_FIELDS
)
"""The whole file."""
