"""The Weights & Biases monitor."""

from heavylift.api.monitor_classes import WandbMonitor

__all__ = ["WandbMonitor"]
