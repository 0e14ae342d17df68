"""The Comet monitor."""

from heavylift.api.monitor_classes import CometMonitor

__all__ = ["CometMonitor"]
