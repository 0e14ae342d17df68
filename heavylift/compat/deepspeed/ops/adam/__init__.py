"""Adam."""

from heavylift.api.optimizers import DeepSpeedCPUAdam, FusedAdam, ZenFlowCPUAdam

from . import cpu_adam, fused_adam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam", "cpu_adam", "fused_adam"]
