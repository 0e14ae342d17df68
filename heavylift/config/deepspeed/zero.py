"""The `zero_optimization` block: what is sharded, and where the optimizer states live."""

from __future__ import annotations

import sys
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from heavylift.config.deepspeed.keys import Block, Number, Switch, Whole, done, no_effect, refused, refused_block
from heavylift.config.deepspeed.refused import NOTHING_ON_NVME

Device = Literal["none", "cpu", "nvme"]

_BUCKETS = "FSDP2 reduces and gathers layer by layer, each layer in one piece"
_PREFETCH = "FSDP2 gathers one layer ahead of the one at work and frees each after use"
_PINNED = "staging buffers are page-locked on a GPU, exactly as large as needed"


class OffloadOptimizer(Block):
    """Where the optimizer states (float32 master and both moments: 12 bytes per parameter, fewer by
    `heavylift.state_format`) live."""

    switch: ClassVar[str | None] = "device"
    off_values: ClassVar[tuple[Any, ...]] = ("none", None)

    device: Annotated[
        Device,
        done(
            "`cpu`: in host memory, stepped there beside forward and backward; `none`: on the device. `nvme` is "
            "refused: use `cpu`, and `ratio` below 1 where host memory is short."
        ),
    ] = "none"
    nvme_path: Annotated[str | None, no_effect(NOTHING_ON_NVME, agrees=("none", ""))] = None
    buffer_count: Annotated[Whole, Field(ge=1), no_effect("staging between the tiers is a ring of small buffers")] = 4
    pin_memory: Annotated[Switch, no_effect(_PINNED, agrees=(True,))] = True
    pipeline_read: Annotated[Switch, no_effect(NOTHING_ON_NVME, agrees=(False,))] = False
    pipeline_write: Annotated[Switch, no_effect(NOTHING_ON_NVME, agrees=(False,))] = False
    fast_init: Annotated[Switch, no_effect(NOTHING_ON_NVME, agrees=(False,))] = False
    ratio: Annotated[
        Number, Field(ge=0, le=1), done("Share of the optimizer states on the host, to the element, in every stage.")
    ] = 1.0
    super_offload: Annotated[
        Switch,
        no_effect("device cpu always gets the overlapped step, with clipping and exact", agrees=(True,)),
    ] = False
    cpuadam_cores_perc: Annotated[
        Number, Field(gt=0, le=1), done("Share of the rank's CPU cores that step the host's states.")
    ] = 0.8


class OffloadParam(Block):
    """Where parameters live between uses (stage 3). `nvme` is refused: use offload_optimizer."""

    switch: ClassVar[str | None] = "device"
    off_values: ClassVar[tuple[Any, ...]] = ("none", None)

    device: Annotated[
        Device,
        no_effect(
            "parameters stay sharded on the device (2 bytes each in bf16 or fp16, over all ranks); only optimizer "
            "states go to the host",
            agrees=("none",),
        ),
    ] = "none"
    nvme_path: Annotated[str | None, no_effect(NOTHING_ON_NVME, agrees=("none", ""))] = None
    buffer_count: Annotated[Whole, Field(ge=1), no_effect("parameters stay on the device")] = 5
    buffer_size: Annotated[Whole, Field(ge=1), no_effect("parameters stay on the device")] = 100_000_000
    max_in_cpu: Annotated[Whole, Field(ge=0), no_effect("parameters stay on the device")] = 1_000_000_000
    pin_memory: Annotated[Switch, no_effect("parameters stay on the device", agrees=(False,))] = True


class LeafModule(Block):
    """Modules that ZeRO-3 does not look into."""

    classes: Annotated[tuple[str, ...], no_effect("skipped modules cannot hang a gather")] = ()
    names: Annotated[tuple[str, ...], no_effect("skipped modules cannot hang a gather")] = ()
    name_suffixes: Annotated[tuple[str, ...], no_effect("skipped modules cannot hang a gather")] = ()


_ZERO_PLUS_PLUS = "remove it: collectives are not compressed; gradients are reduced in float32"


# longer than a class should be: the file has these keys side by side
class ZeroOptimization(Block):
    """What is sharded over the ranks. The sharding itself is PyTorch's FSDP2."""

    stage: Annotated[
        Whole,
        Field(ge=0, le=3),
        done("0: nothing is sharded; 1: optimizer states; 2: and gradients; 3: and parameters."),
    ] = 0
    offload_optimizer: Annotated[OffloadOptimizer, done("Where the optimizer states live.")] = OffloadOptimizer()
    offload_param: Annotated[OffloadParam, done("Where the parameters live.")] = OffloadParam()
    zenflow: Annotated[
        dict[str, Any],
        refused_block(
            "the step on the host overlaps already and is exact: use offload_optimizer.device cpu without zenflow",
            "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
            "full_warm_up_rounds pt_reserved_cores_perc",
            asks=lambda block: True,
        ),
    ] = Field(default_factory=dict)
    gather_16bit_weights_on_model_save: Annotated[
        Switch,
        done(
            "Whether save_16bit_model may gather the weights in stage 3.",
            aliases=("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        ),
    ] = False
    contiguous_gradients: Annotated[Switch, no_effect("gradients of a layer are one buffer", agrees=(True,))] = True
    reduce_scatter: Annotated[Switch, no_effect("stages 1 to 3 always reduce-scatter", agrees=(True,))] = True
    reduce_bucket_size: Annotated[Whole, Field(ge=0), no_effect(_BUCKETS)] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[Switch, no_effect(_BUCKETS)] = True
    allgather_partitions: Annotated[Switch, no_effect("parameters are always all-gathered", agrees=(True,))] = True
    allgather_bucket_size: Annotated[Whole, Field(ge=0), no_effect(_BUCKETS)] = 500_000_000
    overlap_comm: Annotated[
        Switch | None,
        no_effect("collectives always overlap with computation", agrees=(True,), there="true in stage 3, else false"),
    ] = None
    compute_grad_norm: Annotated[Switch, no_effect("the norm is always computed", agrees=(True,))] = True
    parameter_alignment: Annotated[Switch, no_effect("layers are laid out by FSDP2", agrees=(False,))] = False
    load_from_fp32_weights: Annotated[
        Switch, no_effect("checkpoints hold float32 masters, which are always loaded", agrees=(True,))
    ] = True
    elastic_checkpoint: Annotated[
        Switch, no_effect("every checkpoint resumes on another number of ranks", agrees=(False,))
    ] = False
    sub_group_size: Annotated[Whole, Field(ge=0), no_effect("states are stepped layer by layer")] = 1_000_000_000
    prefetch_bucket_size: Annotated[
        Whole, Field(ge=0), no_effect(_PREFETCH, aliases=("stage3_prefetch_bucket_size",))
    ] = 50_000_000
    param_persistence_threshold: Annotated[
        Whole,
        Field(ge=0),
        no_effect(
            "small parameters travel with their layer, in one collective",
            aliases=("stage3_param_persistence_threshold",),
        ),
    ] = 100_000
    model_persistence_threshold: Annotated[
        Whole,
        Field(ge=0),
        no_effect(
            "small parameters travel with their layer, in one collective",
            aliases=("stage3_model_persistence_threshold",),
            there="no limit",
        ),
    ] = sys.maxsize
    max_live_parameters: Annotated[
        Whole, Field(ge=0), no_effect(_PREFETCH, aliases=("stage3_max_live_parameters",))
    ] = 1_000_000_000
    max_reuse_distance: Annotated[Whole, Field(ge=0), no_effect(_PREFETCH, aliases=("stage3_max_reuse_distance",))] = (
        1_000_000_000
    )
    module_granularity_threshold: Annotated[
        Whole,
        Field(ge=0),
        no_effect("layers are gathered whole", agrees=(0,), aliases=("stage3_module_granularity_threshold",)),
    ] = 0
    use_all_reduce_for_fetch_params: Annotated[
        Switch,
        no_effect(
            "parameters are always all-gathered", agrees=(False,), aliases=("stage3_use_all_reduce_for_fetch_params",)
        ),
    ] = False
    allgather_sequential: Annotated[
        Switch, no_effect(_PREFETCH, agrees=(False,), aliases=("stage3_allgather_sequential",))
    ] = False
    ignore_unused_parameters: Annotated[
        Switch, no_effect("parameters without a gradient are never an error", agrees=(True,))
    ] = True
    legacy_stage1: Annotated[Switch, refused("remove it: stage 1 has one implementation")] = False
    round_robin_gradients: Annotated[
        Switch, no_effect("every rank copies its own shard of every layer", agrees=(False,))
    ] = False
    zero_hpz_partition_size: Annotated[
        Whole, Field(ge=0), refused("remove it: there is no second copy of the parameters per node", agrees=(0, 1))
    ] = 1
    zero_quantized_weights: Annotated[Switch, refused(_ZERO_PLUS_PLUS)] = False
    zero_quantized_nontrainable_weights: Annotated[Switch, refused(_ZERO_PLUS_PLUS)] = False
    zero_quantized_gradients: Annotated[Switch, refused(_ZERO_PLUS_PLUS)] = False
    zeropp_loco_param: Annotated[dict[str, Any] | None, refused(_ZERO_PLUS_PLUS, agrees=())] = None
    mics_shard_size: Annotated[Whole, Field(ge=-1), refused("remove it: shards go over all ranks", agrees=(-1,))] = -1
    mics_hierarchical_params_gather: Annotated[Switch, refused("remove it: shards go over all ranks")] = False
    memory_efficient_linear: Annotated[Switch, no_effect("modules are not patched")] = True
    override_module_apply: Annotated[Switch, no_effect("modules are not patched")] = True
    pipeline_loading_checkpoint: Annotated[
        Switch, no_effect("each rank reads only its own slices", agrees=(False,))
    ] = False
    log_trace_cache_warnings: Annotated[Switch, no_effect("there is no trace cache", agrees=(False,))] = False
    enable_sanity_checks: Annotated[Switch, no_effect("invariants are always checked", agrees=(False,))] = False
    save_muon_momentum_buffer_in_memory: Annotated[Switch, no_effect("there is no Muon", agrees=(False,))] = False
    leaf_module: Annotated[LeafModule, no_effect("skipped modules cannot hang a gather")] = LeafModule()
    cpu_offload: Annotated[
        Switch, done("Old: true is `offload_optimizer: {device: cpu}`.", there="false (deprecated)")
    ] = False
    cpu_offload_params: Annotated[
        Switch,
        done(
            "Old: true is `offload_param: {device: cpu}`.",
            there="false (deprecated)",
            aliases=("cpu_offload_param",),
        ),
    ] = False
    cpu_offload_use_pin_memory: Annotated[Switch, no_effect(_PINNED, agrees=(True,), there="false (deprecated)")] = (
        False
    )
