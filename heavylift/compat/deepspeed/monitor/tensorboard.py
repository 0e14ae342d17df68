"""The TensorBoard monitor."""

from heavylift.api.monitor_classes import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
