"""What a configuration is told once at the start: keys without effect, old forms, defaults that surprise."""

from __future__ import annotations

from collections.abc import Sequence

from heavylift.config.deepspeed.checks import OPTIMIZER_DEVICE, optimizer_name, scheduler_name
from heavylift.config.deepspeed.keys import key_of
from heavylift.config.deepspeed.own_checks import formats_without_effect, keys_without_effect
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


def without_effect(reading: Reading) -> dict[str, str]:
    """Canonical path of each key given that has no effect because of what another one says -> why."""
    zero, fp16, given = reading.config.zero_optimization, reading.config.fp16, reading.given
    found = {}
    if zero.cpu_offload_params:
        why = key_of(OffloadParam.model_fields["device"]).text
        found["zero_optimization.cpu_offload_params"] = f"old form of offload_param.device cpu; {why}"
    if fp16.enabled and fp16.loss_scale:
        dynamic = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
        keys = [f"fp16.{key}" for key in dynamic if f"fp16.{key}" in given]
        found |= dict.fromkeys(keys, f"fp16.loss_scale {fp16.loss_scale:g} is a fixed factor")
    found |= dict.fromkeys(keys_without_effect(reading), f"{OPTIMIZER_DEVICE} is none")
    if OPTIMIZER_DEVICE not in given and not zero.cpu_offload and zero.offload_optimizer.ratio != 1:
        # a share of what goes to the host says that something is to go there: the device was forgotten
        found["zero_optimization.offload_optimizer.ratio"] = f"{OPTIMIZER_DEVICE} is not set, which means none"
    found |= formats_without_effect(reading)
    params = reading.params.get("optimizer")
    if isinstance(params, AdamParams) and not params.adam_w_mode:
        if optimizer_name(reading.config.optimizer.type) == OURS["adamw"]:
            found["optimizer.params.adam_w_mode"] = "AdamW's decay is decoupled"
    return found


def combined_notes(reading: Reading) -> list[str]:
    """Those that need more than one key."""
    notes = []
    if reading.config.zero_optimization.cpu_offload:
        notes.append("zero_optimization.cpu_offload: old form, read as offload_optimizer: {device: cpu}")
    notes += [f"{key}: no effect: {why}" for key, why in without_effect(reading).items()]
    scheduler, high = reading.config.scheduler.type, "scheduler.params.warmup_max_lr"
    if scheduler and scheduler_name(scheduler) == "WarmupDecayLR" and high not in reading.given:
        if high not in reading.open_autos:
            notes.append(f"{high}: not given: {DECAY_MAX_LR:g}, as in DeepSpeed, whatever optimizer.params.lr is")
    return notes
