"""The block of ZeRO."""

from heavylift.config.deepspeed.zero import (
    OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig,
)
from heavylift.config.deepspeed.zero import (
    OffloadParam as DeepSpeedZeroOffloadParamConfig,
)
from heavylift.config.deepspeed.zero import (
    ZeroOptimization as DeepSpeedZeroConfig,
)

__all__ = ["DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"]
