"""Helpers."""

from heavylift.api.memory_usage import see_memory_usage

__all__ = ["see_memory_usage"]
