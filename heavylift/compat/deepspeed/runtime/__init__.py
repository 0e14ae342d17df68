"""The engine and what belongs to it."""

from . import (
    activation_checkpointing,
    config,
    config_utils,
    dataloader,
    engine,
    hybrid_engine,
    lr_schedules,
    pipe,
    precision_config,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "config",
    "config_utils",
    "dataloader",
    "engine",
    "hybrid_engine",
    "lr_schedules",
    "pipe",
    "precision_config",
    "utils",
    "zero",
]
