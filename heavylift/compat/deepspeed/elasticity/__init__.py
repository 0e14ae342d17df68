"""Elastic batch sizes."""

from heavylift.api.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
)

from . import config, elasticity

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "config",
    "elasticity",
    "elasticity_enabled",
]
