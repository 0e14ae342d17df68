"""Refused."""

from heavylift.api.refused import MoE

from . import layer

__all__ = ["MoE", "layer"]
