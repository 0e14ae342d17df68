"""The `activation_checkpointing` block: layers of Hugging Face models are computed again in backward.

A model that recomputes already (`model.gradient_checkpointing_enable()`) is left as it is. Left out: modules of one's
own, which call `heavylift.checkpointing.checkpoint` themselves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from heavylift.api.activation_checkpointing import is_configured
from heavylift.config.deepspeed.settings import CheckpointingSettings
from heavylift.memory.boundaries import BoundaryStore
from heavylift.memory.checkpointing import checkpoint_layers
from heavylift.ranks import Ranks
from heavylift.sharding import layers_of

logger = logging.getLogger(__name__)


def is_hugging_face(module: nn.Module) -> bool:
    """Whether it is a model of transformers."""
    # by name: transformers takes seconds to import, and a script without it has no such module
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def recompute_layers(model: nn.Module, settings: CheckpointingSettings, device: torch.device) -> list[nn.Module]:
    """Makes layers recompute as `settings` ask; returns those. Before sharding.

    With `number_checkpoints` the first so many, whose activations wait longest for backward.
    """
    if not settings.enabled:
        return []
    inner = [m for m in model.modules() if is_hugging_face(m) and getattr(m, "supports_gradient_checkpointing", False)]
    layers = list(dict.fromkeys(layer for m in inner for layer in layers_of(m)))
    if not layers:
        if not is_configured() and Ranks.here().rank == 0:  # a script that configures it calls it too
            logger.warning(
                "activation_checkpointing: the model is not one of transformers: recomputed is only what its forward "
                "calls through heavylift.checkpointing.checkpoint"
            )
        return []
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        return []  # the flag that transformers sets on its modules
    recomputed = checkpoint_layers(layers[: settings.number_checkpoints])
    if settings.cpu_checkpointing:
        inputs = _HostInputs(len(recomputed), device)
        for layer in recomputed:
            inputs.attach(layer)
    return recomputed


class _HostInputs:
    """Keeps the layers' inputs in host memory, in slots of the size of the largest that has come so far."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers = num_layers
        self._device = device
        self._store: BoundaryStore | None = None
        self._slot_bytes = 0

    def attach(self, layer: nn.Module) -> None:
        """Around the layer's forward, which recomputes."""
        layer.forward = self._around(layer, layer.forward)

    def _around(self, layer: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not args and "hidden_states" in kwargs:
                args = (kwargs.pop("hidden_states"),)  # checkpointing hands to the hooks what is positional
            if not (layer.training and torch.is_grad_enabled() and args and isinstance(args[0], torch.Tensor)):
                return call(*args, **kwargs)
            with self._store_for(args[0]).keeping(args[0]):
                return call(*args, **kwargs)

        return run

    def _store_for(self, tensor: torch.Tensor) -> BoundaryStore:
        store = self._store
        # another forward before the backward of the first: all slots are taken
        is_full = store is not None and store.usage.host_bytes > 0 and not store.free_slots
        if store is None or is_full or tensor.nbytes > self._slot_bytes:
            # the slots of the old one are freed with the last graph that needs them
            self._slot_bytes = max(self._slot_bytes, tensor.nbytes)
            key = "activation_checkpointing.cpu_checkpointing"
            store = self._store = BoundaryStore(self._num_layers, self._slot_bytes, self._device, key)
        return store
