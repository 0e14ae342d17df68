"""The FLOPs profiler."""

from heavylift.api.flops_profiler import FlopsProfiler, get_model_profile

from . import profiler

__all__ = ["FlopsProfiler", "get_model_profile", "profiler"]
