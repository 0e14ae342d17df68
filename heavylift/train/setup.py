"""Everything a run needs, built in order: config -> data -> process group -> model -> plan -> weights -> optimizer.

What can fail cheaply comes first: tokenising before the process group exists, the plan before the weights.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from heavylift.config.model_folder import resolve_model_folder, resolve_tokenizer_folder
from heavylift.config.schema import Recipe, Tier, TrainConfig
from heavylift.data.batches import BatchPlan, evaluation_plan
from heavylift.data.samples import SampleSet
from heavylift.data.tokenise import load_samples
from heavylift.engine import Engine, build_optimizer, parameter_groups
from heavylift.errors import UserError
from heavylift.gloo_threads import wait_at_exit
from heavylift.launch.cores import split_cores, threads_per_rank
from heavylift.memory.activations import LayerShape, Recompute, Workload
from heavylift.memory.boundaries import BoundaryStore
from heavylift.memory.checkpointing import checkpoint_layers
from heavylift.memory.fit import Setting, choose_ratio, remedies
from heavylift.memory.machine import agree, host_available_bytes, measure
from heavylift.memory.plan import MemoryPlan, check_left_on, check_plan
from heavylift.memory.planner import ModelPlanner
from heavylift.memory.refusal import host_memory_for
from heavylift.models.compiled import compile_layers, why_not_compiled
from heavylift.models.load import (
    attention_of,
    build_on_meta,
    init_random_weights,
    load_hf_config,
    load_weights,
    materialise,
    model_max_length,
    parameter_counts,
    resolve_dtype,
)
from heavylift.models.loss_head import find_loss_head, install_loss_head
from heavylift.models.stored import Layout, check_weights, default_layout
from heavylift.offload.formats import check_format
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.ranks import COLLECTIVE_TIMEOUT, Ranks
from heavylift.sharding import ShardedModel, layers_of, make_mesh, shard_model
from heavylift.train.preflight import check_disk
from heavylift.units import GIB

logger = logging.getLogger(__name__)

PAD_MULTIPLE = {"cpu": 8, "cuda": 64}
"""Sequences are padded to this: whole tiles of the matrix units, and few different shapes to compile for."""


@dataclass(frozen=True)
class Data:
    """Samples and the plans over them."""

    samples: SampleSet
    train: BatchPlan
    evaluation: BatchPlan | None
    num_steps: int


@dataclass(frozen=True)
class Run:
    """What the loop works with."""

    recipe: Recipe
    ranks: Ranks
    data: Data
    engine: Engine
    plan: MemoryPlan
    hf_config: Any
    tokenizer: Any | None
    num_params: int
    num_trainable_params: int
    dtype: torch.dtype
    folder: Path
    """The model's, where it was read."""
    layout: Layout
    """The tensors of the files: those that were read, or such as transformers would write."""


def set_up(recipe: Recipe) -> Run:
    """Builds the run on this rank. Raises UserError for anything that the user can mend."""
    ranks = Ranks.here()
    folder = resolve_model_folder(recipe)
    hf_config = load_hf_config(folder, recipe.model.trust_remote_code)
    tokenizer = None if recipe.data.format == "random" else load_tokenizer(recipe)
    data = load_data(recipe, ranks, hf_config, tokenizer)
    start_process_group(ranks)
    # dropout: by the recipe's seed, and another on every rank
    torch.manual_seed(recipe.train.seed * ranks.world_size + ranks.rank)
    dtype = resolve_dtype(recipe.model.dtype, ranks.device.type)
    model = build_on_meta(hf_config, recipe.model, dtype)
    stored = check_weights(model, folder) if recipe.model.init == "pretrained" else None
    layout = default_layout(model) if stored is None else stored
    num_params, num_trainable = parameter_counts(model)
    check_disk(recipe, num_params)
    prepare_head(model, recipe.train, ranks.rank)
    recomputed = prepare_layers(model, recipe.train, ranks.device)
    sharded = shard_model(model, recipe.engine.zero_stage, make_mesh(recipe.engine.zero_stage, ranks.device.type))
    options = tiered_options(recipe, split_cores(ranks.local_rank, ranks.local_world_size))
    try:
        check_format(options.state_format, {dtype})
    except ValueError as error:
        raise UserError(f"engine.state_format: {error}; set model.dtype to bfloat16, or state_format to fp32") from None
    if recipe.train.cpu_checkpointing:
        keep_boundaries_on_host(recomputed, boundary_bytes(recipe.train, data.train, hf_config, dtype), ranks)
    work = workload(recipe, data.train.longest, model, ranks.device)
    planner = ModelPlanner(sharded, LayerShape.from_config(hf_config), dtype)
    options, plan = place_states(planner, options, work, recipe, ranks)
    materialise(model, ranks.device)
    if stored is not None:
        load_weights(model, folder, stored)
    else:
        init_random_weights(model, float(getattr(hf_config, "initializer_range", 0.02)), recipe.train.seed)
    optimizer = make_optimizer(sharded, recipe.train, options)
    check_left_on(ranks.device, plan, ranks.local_world_size, options.ratio, "engine.ratio")
    engine = Engine(sharded, optimizer, ranks.device)
    recipe = with_ratio(recipe, options.ratio)
    return Run(
        recipe, ranks, data, engine, plan, hf_config, tokenizer, num_params, num_trainable, dtype, folder, layout
    )


def load_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer of the recipe. Raises UserError when transformers cannot open it."""
    from transformers import AutoTokenizer

    folder = resolve_tokenizer_folder(recipe)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=recipe.model.trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: transformers cannot open this tokenizer: {reason}") from None


def load_data(recipe: Recipe, ranks: Ranks, hf_config: Any, tokenizer: Any | None) -> Data:
    """Tokenised samples, split, with the plan of every step."""

    def loader() -> Any:
        return tokenizer

    cache_dir = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heavylift" / "tokens"
    samples = load_samples(
        recipe, loader, cache_dir, model_max_length(hf_config), getattr(hf_config, "vocab_size", None)
    )
    train_samples, val_samples = samples.split(recipe.data.val_size, recipe.train.seed)
    train = recipe.train
    multiple = PAD_MULTIPLE[ranks.device.type]
    plan = BatchPlan(
        train_samples,
        train.per_device_train_batch_size,
        train.gradient_accumulation_steps,
        ranks.world_size,
        train.seed,
        multiple,
    )
    evaluation = None
    if len(val_samples) > 0:
        size = train.per_device_eval_batch_size or train.per_device_train_batch_size
        evaluation = evaluation_plan(val_samples, size, ranks.world_size, multiple)
    return Data(samples, plan, evaluation, plan.num_steps(train.num_train_epochs, train.max_steps))


def start_process_group(ranks: Ranks) -> None:
    """Gloo on CPUs, NCCL on GPUs (with gloo beside it for objects on the CPU). A process without a launcher's variables
    is a world of one."""
    torch.set_num_threads(threads_per_rank(ranks.local_world_size))
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    more: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT}
    if "WORLD_SIZE" not in os.environ:
        more |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if ranks.device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=ranks.device, **more)
    else:
        dist.init_process_group("gloo", **more)
    wait_at_exit()


def prepare_head(model: nn.Module, config: TrainConfig, rank: int) -> None:
    """Lets the head compute the loss in chunks where the recipe and the model allow it; must precede `fully_shard`."""
    reason = install_loss_head(model, config.loss_chunk_tokens)
    if reason is not None and rank == 0:
        logger.warning("train.loss_chunk_tokens: whole logits are computed: %s", reason)


def prepare_layers(model: nn.Module, config: TrainConfig, device: torch.device) -> list[nn.Module]:
    """Activation checkpointing and compilation, both of which must be there before `fully_shard`.

    Returns the layers that are recomputed.
    """
    layers = layers_of(model)
    recomputed: list[nn.Module] = []
    if config.gradient_checkpointing:
        if not layers or not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError(
                f"train.gradient_checkpointing: {type(model).__name__} does not support it; set it to false"
            )
        selective = config.gradient_checkpointing == "selective"
        recomputed = checkpoint_layers(layers, every=config.checkpoint_every, selective=selective)
    if compiles_layers(config, device, model):
        compile_layers(layers, or_eager=config.compile == "auto")
    return recomputed


def compiles_layers(config: TrainConfig, device: torch.device, model: nn.Module) -> bool:
    """Whether the decoder layers are compiled on this device. UserError where that is asked for and known to fail."""
    why_not = why_not_compiled(model)
    if config.compile == "auto":
        return device.type == "cuda" and why_not is None
    if config.compile and why_not is not None:
        raise UserError(f"train.compile: {why_not} and cannot be compiled; set it to false or auto")
    return config.compile


def boundary_bytes(config: TrainConfig, batches: BatchPlan, hf_config: Any, dtype: torch.dtype) -> int:
    """Bytes of what one layer hands to the next, in the widest micro-batch."""
    hidden = int(hf_config.get_text_config().hidden_size)
    return config.per_device_train_batch_size * batches.longest * hidden * dtype.itemsize


def keep_boundaries_on_host(layers: list[nn.Module], slot_bytes: int, ranks: Ranks) -> BoundaryStore:
    """Keeps the recomputed layers' inputs on the host. Allocates nothing yet; UserError where they do not fit."""
    store = BoundaryStore(len(layers), slot_bytes, ranks.device)
    needed, available = store.num_bytes * ranks.local_world_size, host_available_bytes()
    if needed > available:
        raise UserError(
            f"train.cpu_checkpointing: the inputs of {len(layers)} layers need {needed / GIB:.1f} GiB of host memory "
            f"on this machine, {available / GIB:.1f} GiB are free; lower train.per_device_train_batch_size, raise "
            "train.checkpoint_every or set it to false"
        )
    for layer in layers:
        store.attach(layer)
    return store


def tiered_options(recipe: Recipe, cores: list[int]) -> TieredOptions:
    """The optimizer's options of a recipe, for a process that has these CPU cores; ratio 1 where it is still open."""
    threads = recipe.engine.cpu_threads
    if threads != "auto":
        # more threads than cores of its own: let the system place them
        cores = cores[:threads] if threads <= len(cores) else []
    return TieredOptions(
        tier=recipe.engine.offload_optimizer,
        ratio=1.0 if recipe.engine.ratio == "auto" else recipe.engine.ratio,
        schedule=recipe.engine.schedule,
        accumulate=recipe.train.gradient_accumulation_steps > 1,
        max_grad_norm=recipe.train.max_grad_norm,
        num_threads=len(cores) if threads == "auto" else threads,
        cpu_ids=tuple(cores) or None,
        native=recipe.engine.native_kernel,
        state_format=recipe.engine.state_format,
        gradients_on=recipe.engine.gradients_on,
        streamed_share=recipe.engine.streamed_share,
    )


def workload(recipe: Recipe, longest: int, model: nn.Module, device: torch.device) -> Workload:
    """What one process computes on in a micro-batch. `longest`: positions of the longest sample, padded; `model`: with
    its head prepared."""
    train = recipe.train
    recompute = Recompute.FULL if train.gradient_checkpointing else Recompute.NOTHING
    if train.gradient_checkpointing == "selective":
        recompute = Recompute.SELECTIVE
    head = find_loss_head(model)
    return Workload(
        micro_batch=train.per_device_train_batch_size,
        seq=longest,
        recompute=recompute,
        recompute_every=train.checkpoint_every,
        inputs_on_host=train.cpu_checkpointing,
        chunk_tokens=0 if head is None else head.chunk_tokens,
        compiled=compiles_layers(train, device, model),
        eager_attention=attention_of(model) == "eager",  # asked for, or all that the model has
    )


def place_states(
    planner: ModelPlanner, options: TieredOptions, work: Workload, recipe: Recipe, ranks: Ranks
) -> tuple[TieredOptions, MemoryPlan]:
    """The options with the ratio decided, and the plan, which fits this machine. A collective.

    Raises UserError, on every rank, where it does not fit.
    """
    machine = agree(measure(ranks.device), ranks.device)
    setting, local = Setting(options, work), ranks.local_world_size
    said = []
    if recipe.engine.ratio == "auto" and options.tier is Tier.HOST:
        choice = choose_ratio(planner, setting, machine, local)
        options = replace(options, ratio=choice.ratio)
        said.append(choice.why)
    unused = [f"engine.{name}" for name in recipe.engine.keys_without_effect]
    if unused:
        said.append(f"{', '.join(unused)}: without effect, as engine.offload_optimizer is device")
    plan = planner.plan(options, work)
    said += [f"engine.{line}" for line in (*options.without_effect, *plan.without_effect)]
    for line in said if ranks.rank == 0 else ():
        logger.warning("%s", line)
    check_plan(plan, machine, local, options, lambda: remedies(planner, setting, machine, local))
    return options, plan


def make_optimizer(sharded: ShardedModel, config: TrainConfig, options: TieredOptions) -> TieredAdamW:
    """The optimizer over a model that has its weights.

    Raises UserError where the host refuses memory for the states.
    """
    instead = "lower engine.ratio, which keeps a share on the device, or use fewer processes or a smaller model"
    with host_memory_for("the optimizer states", "engine.offload_optimizer", instead):
        return build_optimizer(
            sharded,
            parameter_groups(sharded.module, config.weight_decay),
            options,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )


def with_ratio(recipe: Recipe, ratio: float) -> Recipe:
    """The recipe with the ratio that `auto` came to, so that a run can be repeated as it was."""
    if recipe.engine.ratio != "auto":
        return recipe
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"ratio": ratio})})
