"""Refused."""

from heavylift.api.optimizers import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
