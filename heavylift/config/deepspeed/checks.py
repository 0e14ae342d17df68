"""What the keys of a ds_config mean together: every impossible combination is one clear line.

A check yields (the canonical paths that it concludes from, message). One whose keys had a problem of their own is
dropped, so that one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from heavylift.config.deepspeed.reading import Reading
from heavylift.config.deepspeed.settings import Precision
from heavylift.config.deepspeed.torch_optimizers import SGD, TORCH_OPTIMIZERS
from heavylift.config.deepspeed.training import (
    NO_CORRECTION_WITH_L2,
    OURS,
    REFUSED_OPTIMIZERS,
    REQUIRED_PARAMS,
    SCHEDULERS,
    AdamParams,
)
from heavylift.config.words import named, nearest

Found = Iterator[tuple[tuple[str, ...], str]]

PRECISIONS = {
    "fp32": Precision.FP32,
    "float32": Precision.FP32,
    "float": Precision.FP32,
    "fp16": Precision.FP16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
}

STAGE = "zero_optimization.stage"
OPTIMIZER_DEVICE = "zero_optimization.offload_optimizer.device"
PARAM_DEVICE = "zero_optimization.offload_param.device"


def precision_of(reading: Reading) -> Precision:
    """The parameters' dtype."""
    config = reading.config
    return Precision.FP16 if config.fp16.enabled else Precision.BF16 if config.bf16.enabled else Precision.FP32


def scales_loss(reading: Reading) -> bool:
    """Whether forward computes in float16, whose losses are scaled."""
    config = reading.config
    autocast = config.torch_autocast
    in_half = autocast.enabled and autocast.dtype is not None and PRECISIONS[autocast.dtype] is Precision.FP16
    return bool(config.fp16.enabled or in_half)


def optimizer_device(reading: Reading) -> str:
    """`none`, `cpu` or `nvme`, the old `cpu_offload` included."""
    zero = reading.config.zero_optimization
    return "cpu" if zero.cpu_offload else zero.offload_optimizer.device


def param_device(reading: Reading) -> str:
    """The same for parameters."""
    zero = reading.config.zero_optimization
    return "cpu" if zero.cpu_offload_params else zero.offload_param.device


def optimizer_name(type_name: str) -> str | None:
    """adam, adamw, or the class of torch.optim as torch spells it; None: not one that heavylift builds."""
    lower = type_name.lower()
    return OURS.get(lower) or {name.lower(): name for name in TORCH_OPTIMIZERS}.get(lower)


def scheduler_name(type_name: str) -> str | None:
    """The scheduler's name as DeepSpeed spells it, or None."""
    return {name.lower(): name for name in SCHEDULERS}.get(type_name.lower())


def find_conflicts(reading: Reading, world_size: int, leave_open: bool) -> list[tuple[str, str]]:
    """(a key of it as the file has it, message) of every impossible combination.

    `leave_open`: an "auto" that nobody filled is no problem yet.
    """
    checks = chain(*(check(reading) for check in _CHECKS), _missing_params(reading, leave_open))
    found = usable(checks, reading)
    size = reading.config.data_parallel_size
    if size is not None and size != world_size:
        found.append(
            ("data_parallel_size", f"data_parallel_size: expected the world size {world_size}, got {size}; remove it")
        )
    return found


def usable(found: Iterable[tuple[tuple[str, ...], str]], reading: Reading) -> list[tuple[str, str]]:
    """(a key of it as the file has it, message) of what is not concluded from a key that is wrong itself."""
    return [(place_of(paths, reading), text) for paths, text in found if not _touches(paths, reading.bad)]


def place_of(paths: tuple[str, ...], reading: Reading) -> str:
    """The first of these keys that the file gives, as the file has it; else the first."""
    return next((reading.written[path] for path in paths if path in reading.written), paths[0])


def _touches(paths: tuple[str, ...], bad: frozenset[str]) -> bool:
    return any(path == one or path.startswith(one + ".") for path in paths for one in bad)


def _precision(reading: Reading) -> Found:
    config = reading.config
    fp16, bf16 = config.fp16.enabled, config.bf16.enabled
    if fp16 and bf16:
        yield (
            ("fp16.enabled", "bf16.enabled"),
            "fp16.enabled: expected one of fp16 and bf16, got both enabled; set one to false",
        )
    elif config.torch_autocast.enabled and (fp16 or bf16):
        name, asked = "fp16" if fp16 else "bf16", config.torch_autocast.dtype
        if asked is not None and PRECISIONS[asked] is not precision_of(reading):
            yield (
                ("torch_autocast.dtype", f"{name}.enabled"),
                f"torch_autocast.dtype: expected {precision_of(reading)}, the parameters' dtype by {name}.enabled, got "
                f"{asked}; change one of them",
            )
    asked = config.data_types.param_dtype
    if asked is not None and PRECISIONS[asked] is not precision_of(reading) and not (fp16 and bf16):
        yield (
            ("data_types.param_dtype", "fp16.enabled", "bf16.enabled"),
            f"data_types.param_dtype: expected {precision_of(reading)}, as fp16.enabled and bf16.enabled have it, got "
            f"{asked}; remove it or change those",
        )
    scale = config.fp16
    if fp16 and scale.loss_scale == 0 and 2.0**scale.initial_scale_power < scale.min_loss_scale:
        yield (
            ("fp16.initial_scale_power", "fp16.min_loss_scale"),
            f"fp16.min_loss_scale: expected at most the first scale 2^{scale.initial_scale_power}, got "
            f"{scale.min_loss_scale:g}; lower it or raise fp16.initial_scale_power",
        )


def _offload(reading: Reading) -> Found:
    zero = reading.config.zero_optimization
    device, params = optimizer_device(reading), param_device(reading)
    if device == "nvme":
        yield (
            (OPTIMIZER_DEVICE,),
            "zero_optimization.offload_optimizer.device: heavylift has no NVMe tier; use cpu, with ratio below 1 to "
            "keep a part of the states on the device",
        )
    elif device == "cpu" and zero.stage == 0:
        yield (
            (OPTIMIZER_DEVICE, STAGE, "zero_optimization.cpu_offload"),
            "zero_optimization.offload_optimizer.device: cpu needs sharded optimizer states, and stage 0 shards "
            "nothing; set zero_optimization.stage to 1, 2 or 3 (equal results)",
        )
    if params == "nvme":
        yield (
            (PARAM_DEVICE,),
            "zero_optimization.offload_param.device: heavylift has no NVMe tier; remove offload_param (parameters stay "
            "sharded on the device) and use offload_optimizer.device cpu",
        )
    elif params == "cpu" and zero.stage < 3:
        yield (
            (PARAM_DEVICE, STAGE, "zero_optimization.cpu_offload_params"),
            f"zero_optimization.offload_param.device: cpu needs sharded parameters, and stage {zero.stage} keeps them "
            "whole; set zero_optimization.stage to 3 or remove offload_param",
        )
    if device == "none" and zero.offload_optimizer.super_offload:
        yield (
            ("zero_optimization.offload_optimizer.super_offload", OPTIMIZER_DEVICE),
            "zero_optimization.offload_optimizer.super_offload: steps states that are on the host, and device is none; "
            "set device to cpu or super_offload to false",
        )
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if getattr(zero, old) and f"zero_optimization.{new}.device" in reading.given:
            yield (
                (f"zero_optimization.{old}", f"zero_optimization.{new}.device"),
                f"zero_optimization.{old}: the old form of {new}, which is given too; remove {old}",
            )


def _optimizer(reading: Reading) -> Found:
    type_name = reading.config.optimizer.type
    if type_name is None:
        yield from _missing_type("optimizer", "AdamW", reading)
        return
    name = optimizer_name(type_name)
    if name is None:
        yield ("optimizer.type",), _unknown_optimizer(type_name)
        return
    offloads = optimizer_device(reading) == "cpu"
    if offloads and name not in OURS.values():
        yield (
            ("optimizer.type", OPTIMIZER_DEVICE),
            f"optimizer.type: only Adam and AdamW can have their states on the host, got {name}; use AdamW or set "
            "zero_optimization.offload_optimizer.device to none",
        )
    params = reading.params.get("optimizer")
    if isinstance(params, AdamParams) and name == "adam" and not params.adam_w_mode and params.weight_decay > 0:
        coupled = ("optimizer.params.adam_w_mode", "optimizer.params.weight_decay")
        if offloads:
            yield (
                (*coupled, OPTIMIZER_DEVICE),
                "optimizer.params.adam_w_mode: false (L2 decay in the gradient) works with states on the device only; "
                "remove it, or set zero_optimization.offload_optimizer.device to none",
            )
        if not params.bias_correction:
            yield (("optimizer.params.bias_correction", *coupled), NO_CORRECTION_WITH_L2)
    if isinstance(params, SGD) and params.nesterov and (params.momentum == 0 or params.dampening != 0):
        yield (
            tuple(f"optimizer.params.{key}" for key in ("nesterov", "momentum", "dampening")),
            f"optimizer.params.nesterov: needs momentum above 0 and dampening 0, got {params.momentum:g} and "
            f"{params.dampening:g}; change one of them",
        )


def _unknown_optimizer(type_name: str) -> str:
    instead = REFUSED_OPTIMIZERS.get(type_name.lower())
    if instead is not None:
        return f"optimizer.type: heavylift does not have {type_name}; {instead}"
    return _unknown_type("optimizer", type_name, ["Adam", "AdamW", *TORCH_OPTIMIZERS])


def _unknown_type(block: str, type_name: str, known: Iterable[str]) -> str:
    spelt = {name.lower(): name for name in known}
    match = nearest(type_name.lower(), spelt)
    hint = f"did you mean {spelt[match]}?" if match else f"expected one of {', '.join(spelt.values())}"
    return f"{block}.type: unknown {block} {named(type_name)}; {hint}"


def _missing_type(block: str, such_as: str, reading: Reading) -> Found:
    """Where there are arguments; a block without any asks for nothing."""
    if any(path.startswith(f"{block}.params.") for path in reading.given):
        yield (
            (f"{block}.type", f"{block}.params"),
            f"{block}.type: missing beside {block}.params; set it, such as {such_as}",
        )


def _scheduler(reading: Reading) -> Found:
    type_name = reading.config.scheduler.type
    if type_name is None:
        yield from _missing_type("scheduler", "WarmupLR", reading)
        return
    name = scheduler_name(type_name)
    if name is None:
        yield ("scheduler.type",), _unknown_type("scheduler", type_name, SCHEDULERS)
        return
    params = reading.params["scheduler"].model_dump()
    low, high = params.get("cycle_min_lr"), params.get("cycle_max_lr")
    if low is not None and high is not None and low > high:
        yield (
            ("scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"),
            f"scheduler.params.cycle_min_lr: expected at most cycle_max_lr {high:g}, got {low:g}; change one of them",
        )


def _missing_params(reading: Reading, leave_open: bool) -> Found:
    type_name = reading.config.scheduler.type
    name = scheduler_name(type_name) if type_name is not None else None
    for key in REQUIRED_PARAMS.get(name or "", ()):
        path = f"scheduler.params.{key}"
        is_open = path in reading.open_autos
        if getattr(reading.params["scheduler"], key) is None and not (leave_open and is_open):
            came = '"auto", which nobody filled in' if is_open else "nothing"
            yield (path,), f"{path}: {name} needs it, got {came}; give the number"


def _reduction(reading: Reading) -> Found:
    if reading.config.gradient_allreduce_op == "sum":
        yield (
            ("gradient_allreduce_op",),
            "gradient_allreduce_op: gradients are averaged over the ranks, got sum; remove it and multiply the loss by "
            "the world size",
        )


_CHECKS: tuple[Callable[[Reading], Found], ...] = (_precision, _offload, _optimizer, _scheduler, _reduction)
