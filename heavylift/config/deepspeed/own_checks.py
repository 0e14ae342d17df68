"""What the keys of the `heavylift` block mean together and beside DeepSpeed's: what is impossible is one line each.

The rules are those of a recipe's `engine` section (`heavylift.config.schema`), told in the words of a ds_config.
"""

from __future__ import annotations

from heavylift.config.deepspeed.checks import (
    OPTIMIZER_DEVICE,
    Found,
    optimizer_device,
    optimizer_name,
    precision_of,
    scales_loss,
    usable,
)
from heavylift.config.deepspeed.own import Heavylift
from heavylift.config.deepspeed.reading import Reading
from heavylift.config.deepspeed.settings import Precision
from heavylift.config.deepspeed.training import OURS, AdamParams
from heavylift.config.schema import Schedule, StateFormat

STATE_FORMAT = "heavylift.state_format"
STREAMED_SHARE = "heavylift.streamed_share"
SCHEDULE = "heavylift.schedule"
BF16_STATES = "bf16.bf16_optimizer_states"

_TOO_EARLY = (Schedule.SPECULATIVE, Schedule.IMMEDIATE)


def state_format_of(reading: Reading) -> StateFormat:
    """How the states are stored, `bf16.bf16_optimizer_states` included; float32 where that has no effect."""
    if _without_formats(reading) is not None:
        return StateFormat.FP32
    return asked_format(reading)


def asked_format(reading: Reading) -> StateFormat:
    """What the file says of it, whatever the optimizer."""
    if STATE_FORMAT in reading.given:
        return StateFormat(reading.config.heavylift.state_format)
    return StateFormat.BF16 if _asks_for_bf16(reading) else StateFormat.FP32


def own_schedule(reading: Reading) -> Schedule:
    """The schedule that the file asks for. With a loss scale `auto` is `deferred`: an overflow must leave every bit as
    it was, which a step taken before the check could not promise."""
    asked = Schedule(reading.config.heavylift.schedule)
    return Schedule.DEFERRED if asked is Schedule.AUTO and scales_loss(reading) else asked


def keys_without_effect(reading: Reading) -> list[str]:
    """Keys given that say how the host's states are stepped, where none are there; those at their defaults not
    counted."""
    if optimizer_device(reading) != "none":
        return []
    block, fields = reading.config.heavylift, Heavylift.model_fields
    names = ("gradients_on", "streamed_share", "schedule")
    return [f"heavylift.{name}" for name in names if getattr(block, name) != fields[name].default]


def formats_without_effect(reading: Reading) -> dict[str, str]:
    """Keys given that say how AdamW's states are stored, where the file's optimizer has none, each with why."""
    optimizer = _without_formats(reading)
    if optimizer is None:
        return {}
    block = reading.config.heavylift
    keys = [STATE_FORMAT] if block.state_format != Heavylift.model_fields["state_format"].default else []
    keys += [BF16_STATES] if _asks_for_bf16(reading) else []
    return dict.fromkeys(keys, f"only AdamW's states have a format, and {optimizer}")


def find_own_conflicts(reading: Reading, leave_open: bool) -> list[tuple[str, str]]:
    """(a key of it as the file has it, message) of every impossible combination.

    `leave_open`: an "auto" that nobody filled is no problem yet.
    """
    found = [*_formats(reading, leave_open), *_schedules(reading), *_without_host(reading, leave_open)]
    return usable(found, reading)


def _without_formats(reading: Reading) -> str | None:
    """What the file says of an optimizer that is one of torch.optim and keeps its states as it likes; else None."""
    type_name = reading.config.optimizer.type
    name = optimizer_name(type_name) if type_name is not None else None
    if name is None:
        return None  # the script's own, or not known
    if name not in OURS.values():
        return f"optimizer.type is {name}"
    params = reading.params.get("optimizer")
    if name == OURS["adamw"] or not isinstance(params, AdamParams) or params.adam_w_mode or params.weight_decay == 0:
        return None
    return "optimizer.params.adam_w_mode is false"


def _asks_for_bf16(reading: Reading) -> bool:
    bf16 = reading.config.bf16
    return bf16.enabled and bf16.bf16_optimizer_states


def _formats(reading: Reading, leave_open: bool) -> Found:
    state_format = asked_format(reading)
    if _asks_for_bf16(reading) and state_format is not StateFormat.BF16:
        yield (
            (STATE_FORMAT, BF16_STATES),
            f"{STATE_FORMAT}: expected bf16, which {BF16_STATES} asks for, got {state_format}; remove one of them",
        )
    if _without_formats(reading) is not None:
        return
    precision = precision_of(reading)
    is_open = leave_open and "bf16.enabled" in reading.open_autos
    if state_format is StateFormat.SPLIT and precision is not Precision.BF16 and not is_open:
        instead = " in place of fp16.enabled" if precision is Precision.FP16 else ""
        yield (
            (STATE_FORMAT, "bf16.enabled", "fp16.enabled"),
            f"{STATE_FORMAT}: split needs bfloat16 parameters, which are half of its masters, got {precision}; set "
            f"bf16.enabled to true{instead}, or {STATE_FORMAT} to fp32",
        )
    share = reading.config.heavylift.streamed_share
    if state_format is StateFormat.INT8 and share > 0 and optimizer_device(reading) != "none":
        yield (
            (STREAMED_SHARE, STATE_FORMAT),
            f"{STREAMED_SHARE}: states in format int8 are not streamed, got {share:g}; set it to 0, or {STATE_FORMAT} "
            "to fp32, split or bf16",
        )


def _schedules(reading: Reading) -> Found:
    schedule, state_format = own_schedule(reading), state_format_of(reading)
    if schedule not in _TOO_EARLY or optimizer_device(reading) == "none":
        return
    if not state_format.is_exact:
        key = STATE_FORMAT if STATE_FORMAT in reading.given else BF16_STATES
        why = f"{STATE_FORMAT} {state_format}" if key == STATE_FORMAT else key
        yield (
            (SCHEDULE, key),
            f"{SCHEDULE}: a step that {schedule} has taken too early cannot be taken back with {why}; choose auto, "
            "deferred or synchronous",
        )
    if scales_loss(reading):
        yield (
            (SCHEDULE, "fp16.enabled", "torch_autocast.enabled", "torch_autocast.dtype"),
            f"{SCHEDULE}: {schedule} steps before an overflow of float16 is known, which must leave every bit as it "
            "was; choose auto, deferred or synchronous",
        )
    clipping = reading.config.gradient_clipping
    if schedule is Schedule.IMMEDIATE and clipping > 0:
        yield (
            (SCHEDULE, "gradient_clipping"),
            f"{SCHEDULE}: immediate steps before the gradient norm is known, and gradient_clipping is {clipping:g}; "
            "set gradient_clipping to 0, or choose speculative, deferred or auto",
        )


def _without_host(reading: Reading, leave_open: bool) -> Found:
    """Somebody who says how the host steps and forgets to ask for it must hear of it; who asks for the device has
    decided, and is told when the run starts (`notes.py`)."""
    unused = keys_without_effect(reading)
    is_open = leave_open and OPTIMIZER_DEVICE in reading.open_autos
    if unused and OPTIMIZER_DEVICE not in reading.given and not is_open:
        yield (
            (*unused, OPTIMIZER_DEVICE, "zero_optimization.cpu_offload"),
            f"{unused[0]}: has an effect with {OPTIMIZER_DEVICE} cpu only, and that is not set; add it, or remove "
            f"{' and '.join(unused)}",
        )
