"""ZeRO."""

from heavylift.api.partition import ZeroParamStatus
from heavylift.api.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    TiledLinear,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
