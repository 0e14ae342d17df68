"""Refused."""

from heavylift.api.optimizers import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
