"""The blocks of offload, and what `offload_states` is asked for."""

from heavylift.api.engine_offload import OffloadDeviceEnum, OffloadStateTypeEnum
from heavylift.config.deepspeed.zero import (
    OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig,
)
from heavylift.config.deepspeed.zero import (
    OffloadParam as DeepSpeedZeroOffloadParamConfig,
)

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
