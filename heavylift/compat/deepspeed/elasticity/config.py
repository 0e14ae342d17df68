"""Errors of elastic batch sizes."""

from heavylift.api.elasticity import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

__all__ = ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]
