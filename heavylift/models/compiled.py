"""Decoder layers through `torch.compile`, each whole, and what becomes of a model whose layers are no single graph."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from heavylift.errors import first_line

logger = logging.getLogger(__name__)

_WRITE_INTO_WEIGHTS = frozenset({"gemma3n", "gemma3n_text"})
"""Model types whose layers clamp a weight in forward. Compiled, that is a write which backward takes for an error."""


def why_not_compiled(model: nn.Module) -> str | None:
    """Why the layers of this Hugging Face model must not be compiled, as far as that is known beforehand."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return f"layers of {model_type} write into their weights" if model_type in _WRITE_INTO_WEIGHTS else None


MAX_GRAPHS = 64
"""Of one layer's code, which all layers share. Each kind of layer has graphs of its own, in training and in evaluation,
for the first shape, for any other and for single samples: torch's 8 are not enough for two kinds."""


def why_not_compilable(error: BaseException) -> str | None:
    """What the compiler says in an exception that came out of a compiled layer; None where it is not the compiler's."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it takes a while
        return None
    import torch._dynamo.config as dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    if isinstance(error, FailOnRecompileLimitHit):
        return f"{dynamo.recompile_limit} graphs were not enough for the shapes of their inputs"
    return first_line(error) if isinstance(error, TorchDynamoException) else None


def compile_layers(layers: Sequence[nn.Module], *, or_eager: bool) -> None:
    """Compiles each layer whole. Call before `fully_shard`, gates and whatever else stands in front of a layer.

    `or_eager`: where a layer cannot be compiled all of them run as they are written from then on, and a warning says
    why. Without it the compiler's exception (see `why_not_compilable`) comes out of the forward that meets it.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_GRAPHS)
    for layer in layers:
        layer.compile(fullgraph=True)
    if or_eager:
        fallback = _Fallback()
        for layer in layers:
            assert layer._compiled_call_impl is not None, type(layer)
            layer._compiled_call_impl = fallback.around(layer, layer._compiled_call_impl)


class _Fallback:
    """Runs layers compiled until one of them cannot be."""

    def __init__(self) -> None:
        self._eager = False

    def around(self, layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._eager:
                return layer._call_impl(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                why = why_not_compilable(error)
                if why is None:
                    raise
                self._give_up(why)
            # outside of `except`: the exception's frames hold tensors. Nothing of the layer has run: it is compiled
            # as a whole, and before that
            return layer._call_impl(*args, **kwargs)

        return run

    def _give_up(self, why: str) -> None:
        self._eager = True
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "train.compile: the layers run as they are written, slower and with more memory than planned, since "
                "they cannot be compiled here: %s; false says so from the start",
                why,
            )
