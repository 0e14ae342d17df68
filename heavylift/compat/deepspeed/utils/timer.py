"""Timers."""

from heavylift.api.timers import SynchronizedWallClockTimer, ThroughputTimer

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer"]
