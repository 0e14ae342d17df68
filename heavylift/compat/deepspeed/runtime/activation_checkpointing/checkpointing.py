"""Activation checkpointing."""

from heavylift.api.activation_checkpointing import (
    checkpoint,
    configure,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
)

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]
