"""The base of the configuration's blocks."""

from heavylift.config.deepspeed.keys import Block as DeepSpeedConfigModel

__all__ = ["DeepSpeedConfigModel"]
