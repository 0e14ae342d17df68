"""The `heavylift` block: what heavylift's engine can do and no key of DeepSpeed asks for.

Names and values are those of the `engine` section of a recipe (`heavylift.config.schema.EngineConfig`). A file with the
block still runs under DeepSpeed: its reader (deepspeed/runtime/config.py) looks up the top-level keys that it knows and
passes over all others in silence.

What the keys mean together with others is checked in `own_checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from heavylift.config.deepspeed.keys import Block, Number, done
from heavylift.config.schema import tier_synonyms

IGNORED_THERE = "ignored"


class Heavylift(Block):
    """What no key of DeepSpeed asks for. DeepSpeed ignores the block, so that one file serves both."""

    state_format: Annotated[
        Literal["fp32", "split", "bf16", "int8"],
        done(
            "How AdamW's states are stored, on whatever tier: `fp32` (12 bytes per parameter); `split` (10 bytes, the "
            "same results to the bit; needs bfloat16 parameters); `bf16` (8 bytes: moments in bfloat16, rounded "
            "stochastically, as `bf16.bf16_optimizer_states` asks for); `int8` (6 bytes: moments in 8 bits).",
            there=IGNORED_THERE,
            auto=False,
        ),
    ] = "fp32"
    gradients_on: Annotated[
        Literal["host", "device"],
        BeforeValidator(tier_synonyms),
        done(
            "Where gradients wait until the CPU steps them: `host`, copied as they come (2 bytes of memory per "
            "parameter), or `device`, copied when it is their turn (2 bytes of device memory, which activations have "
            "left by then). With `offload_optimizer.device: cpu`; without effect with gradient accumulation, whose "
            "sums are on the host.",
            there=IGNORED_THERE,
            auto=False,
        ),
    ] = "host"
    streamed_share: Annotated[
        Number,
        Field(ge=0, le=1),
        done(
            "Share of the host's optimizer states that the GPU steps instead of the CPU: they travel over the bus and "
            "back, while gradients stay on the GPU and need no host memory. The same results to the bit. With "
            "`offload_optimizer.device: cpu`, not with `int8`.",
            there=IGNORED_THERE,
            auto=False,
        ),
    ] = 0.0
    schedule: Annotated[
        Literal["auto", "deferred", "speculative", "immediate", "synchronous"],
        done(
            "When the host's states are stepped: `synchronous` after backward; `deferred` beside the next forward; "
            "`immediate` during backward (only without clipping); `speculative` during backward, corrected when "
            "clipping strikes; `auto` chooses. With `offload_optimizer.device: cpu`.",
            there=IGNORED_THERE,
            own_auto=True,
        ),
    ] = "auto"
