"""Refused."""

from heavylift.api.optimizers import FusedLamb

__all__ = ["FusedLamb"]
