"""Refused."""

from heavylift.api.refused import PipelineEngine

__all__ = ["PipelineEngine"]
