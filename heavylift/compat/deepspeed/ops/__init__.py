"""Optimizers."""

from . import adagrad, adam, lamb, lion, transformer

__all__ = ["adagrad", "adam", "lamb", "lion", "transformer"]
