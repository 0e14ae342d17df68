"""The device's class."""

from heavylift.api.accelerator import Accelerator as DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
