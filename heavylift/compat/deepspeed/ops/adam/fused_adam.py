"""Adam on the device."""

from heavylift.api.optimizers import FusedAdam

__all__ = ["FusedAdam"]
