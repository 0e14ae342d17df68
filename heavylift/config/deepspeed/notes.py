"""What a configuration is told once at the start: keys without effect, old forms, defaults that surprise."""

from __future__ import annotations

from collections.abc import Sequence

from heavylift.config.deepspeed.checks import OPTIMIZER_DEVICE, optimizer_device, optimizer_name, scheduler_name
from heavylift.config.deepspeed.keys import key_of
from heavylift.config.deepspeed.own_checks import keys_without_effect
from heavylift.config.deepspeed.reading import Reading
from heavylift.config.deepspeed.training import DECAY_MAX_LR, OURS, AdamParams
from heavylift.config.deepspeed.zero import OffloadParam


def folded(notes: Sequence[str]) -> tuple[str, ...]:
    """The notes (`key: text`), keys of one block with the same text as one: `block.{key, key}: text`."""
    keys: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        key, _, text = note.partition(": ")
        block, _, name = key.rpartition(".")
        keys.setdefault((block, text), []).append(name)
    return tuple(_joined(block, names) + f": {text}" for (block, text), names in keys.items())


def _joined(block: str, names: Sequence[str]) -> str:
    if not block:
        return ", ".join(names)
    return f"{block}.{names[0]}" if len(names) == 1 else f"{block}.{{{', '.join(names)}}}"


def combined_notes(reading: Reading) -> list[str]:
    """Those that need more than one key."""
    config, given = reading.config, reading.given
    notes = []
    if config.zero_optimization.cpu_offload:
        notes.append("zero_optimization.cpu_offload: old form, read as offload_optimizer: {device: cpu}")
    if config.zero_optimization.cpu_offload_params:
        why = key_of(OffloadParam.model_fields["device"]).text
        notes.append(f"zero_optimization.cpu_offload_params: no effect: old form of offload_param.device cpu; {why}")
    if config.fp16.enabled and config.fp16.loss_scale:
        dynamic = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
        notes += [
            f"fp16.{key}: no effect: fp16.loss_scale {config.fp16.loss_scale:g} is a fixed factor"
            for key in dynamic
            if f"fp16.{key}" in given
        ]
    notes += [f"{key}: no effect: {OPTIMIZER_DEVICE} is none" for key in keys_without_effect(reading)]
    pin = "zero_optimization.offload_optimizer.pin_memory"
    if (
        pin in given
        and optimizer_device(reading) == "cpu"
        and not config.zero_optimization.offload_optimizer.pin_memory
    ):
        notes.append(f"{pin}: no effect: staging buffers are page-locked, exactly as large as needed")
    high = "scheduler.params.warmup_max_lr"
    if config.scheduler.type and scheduler_name(config.scheduler.type) == "WarmupDecayLR" and high not in given:
        if high not in reading.open_autos:
            notes.append(f"{high}: not given: {DECAY_MAX_LR:g}, as in DeepSpeed, whatever optimizer.params.lr is")
    params = reading.params.get("optimizer")
    if isinstance(params, AdamParams) and not params.adam_w_mode:
        if optimizer_name(config.optimizer.type) == OURS["adamw"]:
            notes.append("optimizer.params.adam_w_mode: no effect: AdamW's decay is decoupled")
    return notes
