"""Elastic batch sizes."""

from heavylift.api.elasticity import compute_elastic_config, elasticity_enabled

__all__ = ["compute_elastic_config", "elasticity_enabled"]
