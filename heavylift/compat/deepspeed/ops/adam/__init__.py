"""Adam."""

from heavylift.api.optimizers import DeepSpeedCPUAdam, FusedAdam, ZenFlowCPUAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam"]
