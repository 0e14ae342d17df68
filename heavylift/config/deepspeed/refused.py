"""Blocks that do nothing here, and those that are refused as a whole (their keys are listed, not typed)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from heavylift.config.deepspeed.keys import (
    Block,
    Key,
    Switch,
    Whole,
    has_content,
    is_enabled,
    no_effect,
    refused,
    refused_block,
)

NOTHING_ON_NVME = "nothing is kept on NVMe"
_COMMS = "collectives show in PyTorch's profiler"


class Aio(Block):
    """Asynchronous disk access."""

    block_size: Annotated[Whole, Field(ge=1), no_effect(NOTHING_ON_NVME)] = 1_048_576
    queue_depth: Annotated[Whole, Field(ge=1), no_effect(NOTHING_ON_NVME)] = 8
    intra_op_parallelism: Annotated[Whole, Field(ge=1), no_effect(NOTHING_ON_NVME, aliases=("thread_count",))] = 1
    single_submit: Annotated[Switch, no_effect(NOTHING_ON_NVME)] = False
    overlap_events: Annotated[Switch, no_effect(NOTHING_ON_NVME)] = True
    use_gds: Annotated[Switch, no_effect(NOTHING_ON_NVME)] = False


class CommsLogger(Block):
    """Logging of collectives."""

    switch: ClassVar[str | None] = "enabled"
    enabled: Annotated[Switch, no_effect(_COMMS, agrees=(False,))] = False
    verbose: Annotated[Switch, no_effect(_COMMS, agrees=(False,))] = False
    prof_all: Annotated[Switch, no_effect(_COMMS)] = True
    debug: Annotated[Switch, no_effect(_COMMS, agrees=(False,))] = False
    prof_ops: Annotated[tuple[str, ...], no_effect(_COMMS)] = ()


class Throughput(Block):
    """The throughput timer."""

    enabled: Annotated[Switch, no_effect("the line of steps_per_print always has samples per second")] = True
    synchronized: Annotated[Switch, no_effect("the device is synchronised only when times are read")] = True


class Timers(Block):
    """Timers."""

    throughput: Annotated[Throughput, no_effect("the line of steps_per_print always has samples per second")] = (
        Throughput()
    )


_WRITER = "tensors are written by torch.distributed.checkpoint, each rank its own shards"


class Checkpoint(Block):
    """How checkpoints are written. Ours are one format, which resumes on any number of ranks."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
        no_effect("the tag of rank 0 counts"),
    ] = "Warn"
    load_universal: Annotated[Switch, no_effect("every checkpoint is universal", agrees=(False,))] = False
    use_node_local_storage: Annotated[
        Switch, refused("write to storage that all nodes share: every rank reads what others wrote")
    ] = False
    parallel_write: Annotated[dict[str, Any], no_effect(_WRITER, there="{pipeline_stage: false}")] = Field(
        default_factory=dict
    )
    checkpoint_serialization: Annotated[Switch, no_effect(_WRITER)] = True
    writer: Annotated[dict[str, Any] | None, no_effect(_WRITER)] = None


def _tensor_parallel_asks(block: dict[str, Any]) -> bool:
    inner = block.get("tp") if isinstance(block.get("tp"), dict) else {}
    sizes = (block.get("autotp_size", 0), (inner or {}).get("tp_size", 1))
    return any(size not in (0, 1, None, "auto") for size in sizes)


def _anything_enabled(block: dict[str, Any]) -> bool:
    """Whether an `enabled` at any depth is on: these blocks nest."""
    inner = [value for value in block.values() if isinstance(value, dict)]
    return is_enabled(block) or any(_anything_enabled(one) for one in inner)


def _deepcompile_asks(block: dict[str, Any]) -> bool:
    return block.get("deepcompile", False) not in (False, None)


REFUSED_BLOCKS: dict[str, Key] = {
    "amp": refused_block("use bf16.enabled, or torch_autocast.enabled", "enabled opt_level ..."),
    "tensor_parallel": refused_block(
        "remove it: use zero_optimization.stage 3, which shards every layer over all ranks",
        "autotp_size preset_model partition_config tp_overlap_comm dtype tp injection_policy_tuple ...",
        _tensor_parallel_asks,
    ),
    "expert_parallel": refused_block(
        "remove it: use zero_optimization.stage 3, which shards experts too",
        "enabled autoep_size use_grouped_mm top_k score_func moe_layer_pattern ...",
    ),
    "pipeline": refused_block(
        "remove it: use zero_optimization.stage 3 instead of pipeline stages",
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned ...",
        has_content,
    ),
    "compile": refused_block(
        "use engine.compile(), which is torch.compile layer by layer",
        "deepcompile passes offload_activation offload_activation_pin_memory offload_opt_states offload_parameters "
        "double_buffer symmetric_memory free_activation ...",
        _deepcompile_asks,
        "nothing is compiled without being asked; call engine.compile()",
    ),
    "elasticity": refused_block(
        "remove it: checkpoints resume on another number of ranks; give the batch keys",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version "
        "ignore_non_elastic_batch_info prefer_larger_batch num_gpus_per_node model_parallel_size ...",
    ),
    "autotuning": refused_block(
        "remove it: `heavylift config explain FILE --model FOLDER` shows what fits", "enabled fast results_dir ..."
    ),
    "data_efficiency": refused_block("remove it: sample in your data loader", "enabled seed ...", _anything_enabled),
    "curriculum_learning": refused_block("remove it: order samples in your data loader", "enabled ..."),
    "progressive_layer_drop": refused_block("remove it: every layer is trained", "enabled theta gamma"),
    "eigenvalue": refused_block("remove it: nothing uses eigenvalues", "enabled ..."),
    "sparse_attention": refused_block("use attention of your model, such as flex_attention", "...", has_content),
    "hybrid_engine": refused_block("generate with the saved model", "enabled max_out_tokens ..."),
    "nebula": refused_block("use engine.save_checkpoint", "enabled ..."),
    "datastates": refused_block("use engine.save_checkpoint", "...", has_content),
    "weight_quantization": refused_block("train in bf16", "enabled ...", has_content),
    "quantize_training": refused_block("train in bf16", "enabled ...", has_content),
    "compression_training": refused_block("compress after training", "...", _anything_enabled),
}
"""Blocks that are refused where they ask for anything."""
