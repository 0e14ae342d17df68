"""All monitors of a configuration."""

from heavylift.api.monitor_classes import Monitor, MonitorMaster

__all__ = ["Monitor", "MonitorMaster"]
