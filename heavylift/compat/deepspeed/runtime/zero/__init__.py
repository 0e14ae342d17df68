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

from . import config, offload_config, partition_parameters, stage3, stage_1_and_2

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "RandomWeights",
    "TiledLinear",
    "ZeroParamStatus",
    "config",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "set_weights_source",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
