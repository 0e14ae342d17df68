"""The CSV monitor."""

from heavylift.api.monitor_classes import csvMonitor

__all__ = ["csvMonitor"]
