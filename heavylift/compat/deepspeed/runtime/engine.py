"""The engine."""

from heavylift.api.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
