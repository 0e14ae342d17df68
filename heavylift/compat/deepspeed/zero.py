"""ZeRO."""

from heavylift.api.partition import ZeroParamStatus
from heavylift.api.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    RandomWeights,
    TiledLinear,
    register_external_parameter,
    set_weights_source,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "RandomWeights",
    "TiledLinear",
    "ZeroParamStatus",
    "register_external_parameter",
    "set_weights_source",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
