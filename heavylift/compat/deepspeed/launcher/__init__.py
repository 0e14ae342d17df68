"""The launcher is `heavylift launch`."""

from . import runner

__all__ = ["runner"]
