"""The blocks of offload."""

from heavylift.config.deepspeed.zero import (
    OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig,
)
from heavylift.config.deepspeed.zero import (
    OffloadParam as DeepSpeedZeroOffloadParamConfig,
)

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"]
