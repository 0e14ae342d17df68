"""The FLOPs profiler."""

from heavylift.api.flops_profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
