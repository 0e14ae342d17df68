"""Adam on the host."""

from heavylift.api.optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
