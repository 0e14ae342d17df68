"""Monitors."""

from . import comet, config, csv_monitor, monitor, tensorboard, wandb

__all__ = ["comet", "config", "csv_monitor", "monitor", "tensorboard", "wandb"]
