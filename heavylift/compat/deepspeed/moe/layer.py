"""Refused."""

from heavylift.api.refused import MoE

__all__ = ["MoE"]
