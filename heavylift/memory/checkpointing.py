"""Activation checkpointing: decoder layers whose activations are computed again in backward instead of being kept.

Which layers: every n-th. What is computed again within them: all, or all but the outputs of matmuls and attention,
which are dear to compute and kept. Non-reentrant, and inside the layer's forward: FSDP2's hooks stay outside, a
compiled layer compiles it along, and no module is wrapped, so parameters keep their names. Comes before
`layer.compile()` and `fully_shard`. Left out: where the inputs of such layers are kept; see
`heavylift.memory.boundaries`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Not `bmm`: eager attention makes its [heads, seq, seq] scores with it, the last thing that one wants to keep.
_KEPT_OP_NAMES = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
KEPT_OPS = frozenset(getattr(torch.ops.aten, name).default for name in _KEPT_OP_NAMES if hasattr(torch.ops.aten, name))
"""Operators whose outputs `selective` keeps."""


def checkpoint_layers(layers: Sequence[nn.Module], *, every: int = 1, selective: bool = False) -> list[nn.Module]:
    """Checkpoints layers 0, `every`, 2 `every`, ...; returns those.

    `selective`: keep the outputs of `KEPT_OPS` and recompute only the rest. A layer is recomputed where gradients are
    wanted and it is in training mode; evaluation is as before.
    """
    assert every >= 1, f"{every=}"
    chosen = list(layers[::every])
    for layer in chosen:
        layer.forward = _checkpointed(layer, selective)
    return chosen


def _checkpointed(layer: nn.Module, selective: bool) -> Callable[..., Any]:
    forward = layer.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # two calls: the compiler takes no `context_fn` from a variable
        if selective:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _keep_or_recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_or_recompute)
