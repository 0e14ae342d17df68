"""`deepspeed.ops`: the optimizer classes, also as `ops.adam.FusedAdam`."""

from heavylift.api import optimizers as adam
from heavylift.api.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "adam"]
