"""`initialize`: a script's model, optimizer, data and configuration -> an engine that trains, sharded and offloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from heavylift.api import script_errors
from heavylift.api.agreement import check_same_everywhere
from heavylift.api.arguments import find_config
from heavylift.api.dataloader import EngineDataLoader, check_dataset
from heavylift.api.distributed import discover_ranks, init_distributed
from heavylift.api.engine import Engine
from heavylift.api.gathered import mark_gathered
from heavylift.api.memory_check import OFFLOAD, check_memory
from heavylift.api.optimizer_choice import OptimizerChoice, choose_optimizer, note_on, renew_states
from heavylift.api.owners import register_optimizer
from heavylift.api.parameter_offload import ParameterOffload
from heavylift.api.partition import mark_sharded
from heavylift.api.prepare import TORCH_DTYPES, PreparedModel, check_model, prepare_model
from heavylift.api.pretrained import gather_before_saving
from heavylift.api.reports import check_reports
from heavylift.api.torch_step import TorchStep
from heavylift.config.deepspeed.settings import Settings
from heavylift.config.deepspeed.sources import read_source
from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.launch.binding import bind_unless_bound
from heavylift.launch.cores import split_cores
from heavylift.launch.options import DEFAULT_PORT
from heavylift.memory.plan import check_left_on
from heavylift.memory.refusal import host_memory_for
from heavylift.offload.formats import check_format
from heavylift.offload.groups import make_group
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.ranks import Ranks

__all__ = ["init_distributed", "initialize"]

logger = logging.getLogger(__name__)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, torch.optim.Optimizer | None, EngineDataLoader | None, Any]:
    """Returns (engine, optimizer, dataloader, lr_scheduler), None for what the script and configuration do not ask for.

    `config` (or `config_params`, or `args.deepspeed_config`): a dict, the path of a ds_config.json, base64 of one, or a
    `Settings`. `model`: any `nn.Module`, with the same structure on every rank; rank 0's values are taken. `optimizer`
    and `lr_scheduler` may be objects or functions (of the parameters; of the optimizer) and come before those of the
    configuration. `model_parameters`: what the configured optimizer trains, parameters or groups with their own lr and
    weight_decay; default: all that have requires_grad. `training_data`: a dataset, for the dataloader.

    A collective: every rank calls it, with the same, under `heavylift launch`, torchrun, mpirun or srun, or a single
    process on its own. Raises UserError for what cannot be done as asked, and where the ranks bring different things.
    """
    script_errors.install()
    _refuse_parallelism(mpu, mesh_param)
    if training_data is not None:
        check_dataset("initialize: training_data=", training_data)
    module = check_model(model)
    discover_ranks(distributed_port)
    given = find_config(args, config, config_params)
    settings = _read_settings(given)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    ranks = Ranks.here()
    if ranks.rank == 0:
        check_reports(settings)
    _bind_where_it_steps(settings, ranks)
    choice = choose_optimizer(module, optimizer, model_parameters, settings)
    names = [] if choice is None else choice.remember_names(module)
    check_same_everywhere(module, settings, choice, names)
    if choice is not None:
        _freeze_the_rest(module, {name for group in names for name in group}, ranks)
    prepared = prepare_model(module, settings, ranks.device)
    step_optimizer = None
    if choice is not None:
        choice.follow(module, names)
        step_optimizer = build_optimizer(choice, prepared, settings, ranks)
        register_optimizer(step_optimizer)
    scheduler = _make_scheduler(lr_scheduler, settings, step_optimizer)
    engine = Engine(prepared.sharded, step_optimizer, scheduler, settings, ranks)
    engine.scalars = prepared.scalars
    gather_before_saving(module, prepared.scalars, is_sharded=settings.stage > 0)
    engine.config = {} if isinstance(given, Settings) else read_source(given).values
    if settings.stage == 3:
        mark_sharded(module.parameters())
        mark_gathered(prepared.sharded)
        if step_optimizer is not None:
            vars(step_optimizer)["parameter_offload"] = ParameterOffload()
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    if ranks.rank == 0:
        _tell(settings, None if choice is None else choice.client)
    return engine, step_optimizer, engine.training_dataloader, scheduler


def _tell(settings: Settings, client: torch.optim.Optimizer | None) -> None:
    """What was accepted without effect, once; with `dump_state` everything that the configuration comes to."""
    if settings.optimizer is not None and client is not None:
        logger.warning("optimizer: the block of the configuration has no effect: initialize() got optimizer=")
    if client is not None and (note := note_on(client)) is not None:
        logger.warning("%s", note)
    for note in settings.notes:
        logger.warning("%s", note)
    if not settings.skip_nonfinite:
        logger.warning("bf16.check_grad_overflow: no effect: a step that is not finite is always skipped")
    if settings.dump_state:
        for key, value in vars(settings).items():
            print(f"{key:32} {value}", flush=True)


def _bind_where_it_steps(settings: Settings, ranks: Ranks) -> None:
    """Where the host steps beside a GPU, ranks that share cores or fetch over another socket slow each other down."""
    if settings.offload.tier is not Tier.HOST or ranks.device.type != "cuda":
        return
    for trouble in bind_unless_bound(ranks.local_rank, ranks.local_world_size):
        if ranks.rank == 0:
            logger.warning("%s", trouble)


def _refuse_parallelism(mpu: Any, mesh_param: Any) -> None:
    if mpu is not None and not callable(getattr(mpu, "get_model_parallel_world_size", None)):
        raise UserError(
            f"initialize: mpu= should have get_model_parallel_world_size(), got {type(mpu).__name__}; leave it out"
        )
    if mpu is not None and any(
        int(getattr(mpu, name)()) > 1
        for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
        if callable(getattr(mpu, name, None))
    ):
        raise UserError("initialize: mpu= asks for model parallelism, which is not supported; leave it out")
    if mesh_param is not None and tuple(mesh_param)[1:] not in ((), (1,)):
        raise UserError(f"initialize: mesh_param={mesh_param} asks for sequence parallelism, which is not supported")


def _read_settings(config: Any) -> Settings:
    if isinstance(config, Settings):
        return config
    from heavylift.config.deepspeed.parse import load_settings

    return load_settings(config, Ranks.here().world_size)


def _freeze_the_rest(model: nn.Module, trained: set[str], ranks: Ranks) -> None:
    """What no group trains needs no gradient."""
    rest = [(name, p) for name, p in model.named_parameters() if p.requires_grad and name not in trained]
    for _, param in rest:
        param.requires_grad_(False)
    if rest and ranks.rank == 0:
        more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
        shown = ", ".join(name for name, _ in rest[:3])
        logger.warning("in no parameter group, so not trained: %s%s", shown, more)


def build_optimizer(
    choice: OptimizerChoice, prepared: PreparedModel, settings: Settings, ranks: Ranks
) -> TieredAdamW | TorchStep:
    """The optimizer over the sharded parameters, with the masters from before rounding."""
    if not choice.tiered:
        inner = choice.client
        if inner is None:
            assert choice.make is not None
            inner = choice.make(choice.param_groups)
        step = TorchStep(inner, settings.gradient_clipping)
        renew_states(inner)
        if settings.state_format is not StateFormat.FP32 and ranks.rank == 0:
            keys = "heavylift.state_format"
            if settings.state_format is StateFormat.BF16:
                keys += " or bf16.bf16_optimizer_states"
            logger.warning("%s: no effect with %s: only AdamW has it", keys, type(inner).__name__)
        params = dict(prepared.sharded.module.named_parameters())
        for name, values in prepared.take_masters():
            step.write_master(params[name], values)
        return step
    groups = [make_group(g.name, g.params, g.module) for g in prepared.sharded.groups]
    options = tiered_options(settings, ranks)
    plan = check_memory(prepared.sharded, TORCH_DTYPES[settings.precision], options, ranks)
    for line in (*options.without_effect, *plan.without_effect) if ranks.rank == 0 else ():
        logger.warning("heavylift.%s", line)
    instead = (
        "lower its `ratio`, which keeps a share on the device, or use fewer ranks on this machine or a smaller model"
    )
    with host_memory_for("the optimizer states", OFFLOAD, instead):
        tiered = TieredAdamW(choice.param_groups, groups=[g for g in groups if g is not None], options=options)
    prepared.give_masters(tiered)
    check_left_on(ranks.device, plan, ranks.local_world_size, options.ratio, f"{OFFLOAD}.ratio")
    return tiered


def tiered_options(settings: Settings, ranks: Ranks) -> TieredOptions:
    """Where the states go, how they are stored and when they step. Raises UserError for what excludes each other, which
    a `Settings` made by hand may ask for."""
    offload = settings.offload
    cores: Sequence[int] = split_cores(ranks.local_rank, ranks.local_world_size)
    num_threads = max(1, round(len(cores) * offload.cores_perc))
    if offload.schedule is Schedule.IMMEDIATE and settings.gradient_clipping > 0:
        raise UserError("gradient_clipping: the schedule `immediate` steps before the norm is known; set it to 0")
    try:
        check_format(settings.state_format, {TORCH_DTYPES[settings.precision]})
        return TieredOptions(
            tier=offload.tier,
            ratio=offload.ratio,
            schedule=offload.schedule if offload.tier is Tier.HOST else Schedule.SYNCHRONOUS,
            accumulate=settings.batch.accumulation > 1 or not settings.managed_accumulation,
            max_grad_norm=settings.gradient_clipping,
            num_threads=num_threads,
            cpu_ids=tuple(cores[:num_threads]) or None,
            state_format=settings.state_format,
            gradients_on=offload.gradients_on,
            streamed_share=offload.streamed_share if offload.tier is Tier.HOST else 0.0,
        )
    except ValueError as error:
        raise UserError(f"heavylift: {error}; change the `Settings`") from None


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises UserError for one that cannot step, or sets the rates of another optimizer."""
    if not callable(getattr(scheduler, "step", None)):
        raise UserError(
            "initialize: lr_scheduler= should be a scheduler or a function of the optimizer that makes one, got "
            f"{shown(scheduler)}"
        )
    own = {id(group) for group in ([] if optimizer is None else optimizer.param_groups)}
    theirs = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if theirs and not own & {id(group) for group in theirs}:
        raise UserError(
            "initialize: lr_scheduler= sets the learning rate of another optimizer; make it over the one that "
            "initialize() gets, or pass a function of the optimizer"
        )


def _make_scheduler(client: Any, settings: Settings, optimizer: torch.optim.Optimizer | None) -> Any:
    """The script's scheduler before the configuration's; a function gets the optimizer."""
    if client is not None:
        is_maker = callable(client) and not isinstance(client, torch.optim.lr_scheduler.LRScheduler)
        scheduler = client(optimizer) if is_maker else client
        _check_scheduler(scheduler, optimizer)
        own = getattr(scheduler, "optimizer", None)
        if isinstance(own, torch.optim.Optimizer) and own is not optimizer:
            # ours steps in its place, always before the scheduler: else torch warns of the wrong order
            own._opt_called = True  # type: ignore[attr-defined]
        return scheduler
    if settings.scheduler is None:
        return None
    if optimizer is None:
        raise UserError("scheduler: there is no optimizer whose learning rate it could set; add an `optimizer` block")
    from heavylift.api.lr_schedules import make_scheduler

    return make_scheduler(settings.scheduler, optimizer)
