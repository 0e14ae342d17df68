"""The engine and what belongs to it."""

from . import activation_checkpointing, config, dataloader, engine, lr_schedules, utils, zero

__all__ = ["activation_checkpointing", "config", "dataloader", "engine", "lr_schedules", "utils", "zero"]
