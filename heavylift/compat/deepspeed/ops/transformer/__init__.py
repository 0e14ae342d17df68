"""Refused."""

from heavylift.api.refused import DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerLayer"]
