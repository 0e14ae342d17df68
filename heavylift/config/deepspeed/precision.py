"""The precision blocks: fp16, bf16, torch_autocast, amp, data_types. Masters are float32 in all of them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from heavylift.config.deepspeed.keys import Block, Number, Switch, Whole, done, no_effect


def _dtype_name(value: Any) -> Any:
    # torch.float16 and "torch.float16", FP16 and fp16
    return str(value).lower().removeprefix("torch.") if isinstance(value, str) else value


Dtype = Annotated[
    Literal["fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half"], BeforeValidator(_dtype_name)
]
HalfDtype = Annotated[Literal["bf16", "fp16", "bfloat16", "float16", "half"], BeforeValidator(_dtype_name)]
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")

_EXACT_STATES = "masters, gradients' sums and moments are float32: more exact, 12 bytes per parameter on their tier"


class Fp16(Block):
    """Parameters in float16, the loss scaled."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Annotated[Switch, done("Parameters, forward and backward in float16; masters in float32.")] = False
    auto_cast: Annotated[Switch, done("Float inputs of forward are cast to float16.")] = False
    loss_scale: Annotated[Number, Field(ge=0), done("A fixed factor; 0: the scale adapts.")] = 0.0
    initial_scale_power: Annotated[Whole, Field(ge=0, le=126), done("The scale starts at 2 to this power.")] = 16
    loss_scale_window: Annotated[Whole, Field(ge=1), done("Good steps until the scale doubles.")] = 1000
    hysteresis: Annotated[Whole, Field(ge=1), done("Overflows until the scale halves, in every stage.")] = 2
    consecutive_hysteresis: Annotated[Switch, done("A good step gives the hysteresis back.")] = False
    min_loss_scale: Annotated[
        Number, Field(gt=0), done("The scale goes no lower; an overflow there ends the run, in every stage.")
    ] = 1.0
    fp16_master_weights_and_grads: Annotated[Switch, no_effect(_EXACT_STATES, agrees=(False,))] = False


class Bf16(Block):
    """Parameters in bfloat16."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Annotated[Switch, done("Parameters, forward and backward in bfloat16; masters in float32.")] = False
    check_grad_overflow: Annotated[
        Switch,
        done("A step whose gradient norm is not finite is skipped, in every stage.", there="true (stages 1, 2 only)"),
    ] = True
    immediate_grad_update: Annotated[
        Switch, no_effect("gradients are taken as they arrive anyway", agrees=(True, False))
    ] = False
    bf16_master_weights_and_grads: Annotated[
        Switch, no_effect("masters and gradients' sums are float32: more exact, 4 bytes each", agrees=(False,))
    ] = False
    bf16_optimizer_states: Annotated[
        Switch,
        done(
            "AdamW's moments are kept in bfloat16, rounded stochastically: 8 bytes per parameter with the float32 "
            "master, where 12 are exact (state_formats.md)."
        ),
    ] = False


class TorchAutocast(Block):
    """torch.autocast around forward; parameters keep their dtype (float32 without fp16 and bf16)."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Annotated[Switch, done("Forward runs under torch.autocast.")] = False
    dtype: Annotated[HalfDtype | None, done("bfloat16 or float16 (which brings a loss scale); default bfloat16.")] = (
        None
    )
    lower_precision_safe_modules: Annotated[
        tuple[str, ...] | None, no_effect("autocast chooses operation by operation, as PyTorch lists them")
    ] = None


class DataTypes(Block):
    """Dtypes of single things."""

    grad_accum_dtype: Annotated[
        Dtype | None,
        no_effect(
            "gradients always add up in float32",
            agrees=FP32_NAMES,
            there="the parameters' dtype",
        ),
    ] = None
    param_dtype: Annotated[Dtype | None, done("Must agree with fp16.enabled and bf16.enabled.")] = None
    buffer_dtype: Annotated[
        Dtype | None, done("Float buffers are cast to it; without it they keep their dtype.", there="null")
    ] = None
    keep_in_fp32_modules: Annotated[
        tuple[str, ...] | None, no_effect("buffers keep their dtype unless buffer_dtype asks", there='`"auto"`')
    ] = None
