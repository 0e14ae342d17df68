"""Refused."""

from heavylift.api.refused import DeepSpeedHybridEngine

__all__ = ["DeepSpeedHybridEngine"]
